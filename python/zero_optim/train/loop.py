"""A run from its first line to its last: steps, checkpoints, and what is told at the end."""

from __future__ import annotations

import os

import torch

from .config import TrainRequest
from .data import unigram_entropy
from .model import generate
from .plan import Plan, make_plan
from .report import Progress, final_table, plot_losses
from .run_dir import LogFile
from .trainer import Trainer
from .world import INTERRUPTED, StopFlag, World, choose_device, join_world, local_ranks

_SAMPLE_PROMPT = 32  # bytes
_SAMPLE_LENGTH = 400  # bytes


def train(request: TrainRequest) -> int:
    """Trains as asked; returns the exit code, 0, or 130 when interrupted. Raises UsageError, on every rank alike."""
    device = choose_device(request.given.get("device"), local_ranks())
    with join_world(device) as world:
        stop = StopFlag()
        if world.leads:
            print("reading the text", flush=True)
        plan = make_plan(request, world)
        trainer = Trainer(plan, world)
        try:
            if world.leads:
                if plan.own_folder:
                    plan.run_dir.rewind(trainer.steps_done)
                _print_header(trainer, plan, world)
            if trainer.steps_done >= plan.config.steps:
                return _say_done(trainer, plan, world)
            stopped_at = _run_steps(trainer, plan, world, stop)
            if stopped_at is not None:
                return _say_interrupted(plan, world, stopped_at)
            _finish(trainer, plan, world)
            return 0
        finally:
            trainer.optimizer.close()


def _run_steps(trainer: Trainer, plan: Plan, world: World, stop: StopFlag) -> int | None:
    """Trains to the last step and saves. Returns the step at which the ranks agreed to stop, if they did."""
    config = plan.config
    log, progress = _open_outputs(trainer, plan, world)
    try:
        for step in range(trainer.steps_done + 1, config.steps + 1):
            outcome = trainer.step(step, asked_to_stop=bool(stop))
            if log and progress:
                log.write(outcome.record)
                progress.show(outcome.record)
            last = outcome.stop or step == config.steps
            if last or (config.save_every and step % config.save_every == 0):
                trainer.save(plan.run_dir.checkpoints, step)
            if outcome.stop and step < config.steps:
                return step
    finally:
        if log and progress:
            log.close()
            progress.close()
    return None


def _open_outputs(trainer: Trainer, plan: Plan, world: World) -> tuple[LogFile | None, Progress | None]:
    if not world.leads:
        return None, None
    return plan.run_dir.open_log(), Progress(trainer.steps_done, plan.config.steps)


def _finish(trainer: Trainer, plan: Plan, world: World) -> None:
    """Validates on every rank; rank 0 then tells and draws."""
    reports = world.comm.gather_objects(trainer.report(plan.config.steps - trainer.steps_done), "the last report")
    if world.leads:
        print("validating and sampling", flush=True)
    validation_loss = trainer.validation_loss()
    with trainer.whole_model():
        if world.leads:
            _write_sample(trainer, plan)
    if not world.leads:
        return
    entropy = unigram_entropy(plan.corpus.validation)
    table = final_table(
        reports,
        stage=plan.config.stage,
        parameters=trainer.parameters(),
        unsharded=trainer.unsharded_parameters(),
        itemsize=plan.config.torch_dtype.itemsize,
        on_gpu=world.device.type == "cuda",
    )
    print(f"\n{table}\n")
    problem = plot_losses(plan.run_dir.path / "loss.png", plan.run_dir.read_log(), validation_loss, entropy)
    if problem:
        print(problem)
    print(f"validation loss {validation_loss:.4f}")
    print(f"unigram entropy {entropy:.4f}")
    print("  nats per byte of held-out text; the entropy is of that text's own byte counts")
    print(f"written to {plan.run_dir.path}", flush=True)


def _write_sample(trainer: Trainer, plan: Plan) -> None:
    prompt = plan.corpus.validation[:_SAMPLE_PROMPT].long()
    text = generate(trainer.model, prompt, _SAMPLE_LENGTH, seed=plan.config.seed)
    (plan.run_dir.path / "sample.txt").write_bytes(bytes(text.tolist()))


def _say_interrupted(plan: Plan, world: World, step: int) -> int:
    if world.leads:
        print(f"interrupted after step {step}; go on with --resume {plan.run_dir.path}", flush=True)
    return INTERRUPTED


def _say_done(trainer: Trainer, plan: Plan, world: World) -> int:
    if world.leads:
        print(f"all {plan.config.steps} steps are done; a larger --steps goes on", flush=True)
    return 0


def _print_header(trainer: Trainer, plan: Plan, world: World) -> None:
    config, text = plan.config, plan.corpus
    gpus = torch.cuda.device_count()
    if config.device == "cpu" and 0 < gpus < local_ranks():
        print(f"{local_ranks()} ranks and {gpus} GPUs on this machine: training on the CPU")
    if config.dtype == "fp16" and config.device == "cpu":
        print("fp16 on a CPU: matrix products are about 60 times slower than in bf16, so the default model is tiny")
    shape = f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, window of {config.seq} bytes"
    print(f"model  {trainer.parameters():,} parameters in {config.dtype}: {shape}")
    print(f"data   {text.name}: {text.train.numel():,} bytes to train on, {text.validation.numel():,} held out")
    each = f"{torch.get_num_threads()} threads" if config.device == "cpu" else torch.cuda.get_device_name(world.device)
    units = f": {config.layers} blocks, each gathered when it is used" if config.stage >= 3 and world.size > 1 else ""
    ranks = f"{world.size} on {config.device} ({world.backend or 'no process group'}, {each})"
    print(f"ranks  {ranks}, stage {config.stage}{units}")
    resumed = f", after step {trainer.steps_done}" if plan.saved else ""
    print(f"run    {plan.run_dir.path}, process {os.getpid()}{resumed}", flush=True)
