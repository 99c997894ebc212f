"""A run from its first line to its last: steps, checkpoints, and what is told at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from .account import Account, Validation, draw_losses, open_account, write_page
from .config import TrainRequest
from .data import unigram_entropy
from .model import generate
from .output import say
from .plan import RunPlan, make_plan
from .report import Progress, final_table
from .run_dir import LogFile
from .session import Outcome, RankReport
from .trainer import Trainer
from .world import INTERRUPTED, StopFlag, World, choose_device, join_world, local_ranks

_SAMPLE_PROMPT = 32  # bytes
_SAMPLE_LENGTH = 400  # bytes


def train(request: TrainRequest) -> int:
    """Trains as asked; returns the exit code, 0, or 130 when interrupted. Raises UsageError, on every rank alike."""
    device = choose_device(request.given.get("device"), local_ranks())
    with join_world(device) as world:
        stop = StopFlag()
        plan = make_plan(request, world)
        trainer = Trainer(plan, world)
        try:
            if world.leads:
                if plan.own_folder:
                    plan.run_dir.rewind(trainer.steps_done)
                _print_header(trainer, plan, world)
            if trainer.steps_done >= plan.config.steps:
                return _say_done(trainer, plan, world)
            return _train_on(trainer, plan, world, stop)
        finally:
            trainer.optimizer.close()


def _train_on(trainer: Trainer, plan: RunPlan, world: World, stop: StopFlag) -> int:
    """All steps that are left, or those until the ranks are asked to stop; returns the exit code."""
    account = open_account(trainer, plan, world, _facts(trainer, plan, world)) if world.leads else None
    begun_after = trainer.steps_done
    try:
        with trainer.tracker:
            stopped_at = _run_steps(trainer, plan, world, stop)
        last = plan.config.steps if stopped_at is None else stopped_at
        reports = world.comm.gather_objects(trainer.report(last - begun_after), "the last report")
        if stopped_at is None:
            _finish(trainer, plan, world, reports, account)
            return 0
        if account:
            account.end(Outcome.INTERRUPTED, stopped_at, reports)
            say(write_page(plan.run_dir))
            go_on = f"go on with --resume {plan.run_dir.path}" if plan.config.checkpoint else "nothing was saved"
            say(f"interrupted after step {stopped_at}; {go_on}")
        return INTERRUPTED
    except Exception as error:
        if account:
            account.fail(error)
        raise


def _run_steps(trainer: Trainer, plan: RunPlan, world: World, stop: StopFlag) -> int | None:
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
            if config.checkpoint and (last or (config.save_every and step % config.save_every == 0)):
                trainer.save(plan.run_dir.checkpoints, step)
            if outcome.stop and step < config.steps:
                return step
    finally:
        if log and progress:
            log.close()
            progress.close()
    return None


def _open_outputs(trainer: Trainer, plan: RunPlan, world: World) -> tuple[LogFile | None, Progress | None]:
    if not world.leads:
        return None, None
    return plan.run_dir.open_log(), Progress(trainer.steps_done, plan.config.steps)


def _finish(
    trainer: Trainer, plan: RunPlan, world: World, reports: Sequence[RankReport], account: Account | None
) -> None:
    """Validates on every rank; rank 0 then tells and draws."""
    if world.leads:
        say("validating and sampling")
    validation_loss = trainer.validation_loss()
    with trainer.whole_model():
        if world.leads:
            _write_sample(trainer, plan)
    if account is None:
        return
    entropy = unigram_entropy(plan.corpus.validation)
    account.end(Outcome.FINISHED, plan.config.steps, reports, Validation(validation_loss, entropy))
    _tell(trainer, plan, world, reports, Validation(validation_loss, entropy))


def _tell(trainer: Trainer, plan: RunPlan, world: World, reports: Sequence[RankReport], validation: Validation) -> None:
    table = final_table(reports, trainer.planned(), on_gpu=world.device.type == "cuda")
    say(f"\n{table}\n")
    if problem := draw_losses(plan.run_dir):
        say(problem)
    say(f"validation loss {validation.loss:.4f}")
    say(f"unigram entropy {validation.entropy:.4f}")
    say("  nats per byte of held-out text; the entropy is of that text's own byte counts")
    say(write_page(plan.run_dir))
    say(f"written to {plan.run_dir.path}")


def _write_sample(trainer: Trainer, plan: RunPlan) -> None:
    prompt = plan.corpus.validation[:_SAMPLE_PROMPT].long()
    text = generate(trainer.model, prompt, _SAMPLE_LENGTH, seed=plan.config.seed)
    (plan.run_dir.path / "sample.txt").write_bytes(bytes(text.tolist()))


def _say_done(trainer: Trainer, plan: RunPlan, world: World) -> int:
    if world.leads:
        say(f"all {plan.config.steps} steps are done; a larger --steps goes on")
    return 0


def _print_header(trainer: Trainer, plan: RunPlan, world: World) -> None:
    config = plan.config
    gpus = torch.cuda.device_count()
    if config.device == "cpu" and 0 < gpus < local_ranks():
        say(f"{local_ranks()} ranks and {gpus} GPUs on this machine: training on the CPU")
    if config.dtype == "fp16" and config.device == "cpu":
        say("fp16 on a CPU: matrix products are about 60 times slower than in bf16, so the default model is tiny")
    for name, fact in _facts(trainer, plan, world).items():
        say(f"{name:<6} {fact}")
    resumed = f", after step {trainer.steps_done}" if plan.saved else ""
    say(f"run    {plan.run_dir.path}, process {os.getpid()}{resumed}")


def _facts(trainer: Trainer, plan: RunPlan, world: World) -> dict[str, str]:
    """Describe what is run, for the header and for ``run.json``."""
    config, text = plan.config, plan.corpus
    shape = f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, window of {config.seq} bytes"
    each = f"{torch.get_num_threads()} threads" if config.device == "cpu" else torch.cuda.get_device_name(world.device)
    units = f": {config.layers} blocks, each gathered when it is used" if config.stage >= 3 and world.size > 1 else ""
    ranks = f"{world.size} on {config.device} ({world.backend or 'no process group'}, {each})"
    return {
        "model": f"{trainer.parameters():,} parameters in {config.dtype}: {shape}",
        "data": f"{text.name}: {text.train.numel():,} bytes to train on, {text.validation.numel():,} held out",
        "ranks": f"{ranks}, stage {config.stage}{units}",
    }
