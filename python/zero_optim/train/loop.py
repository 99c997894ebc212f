"""A run from start to end: steps, checkpoints, validation, and the final report."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..gather_parameters import gather_parameters
from .account import Account, Validation, draw_losses, open_account, write_page
from .config import TrainRequest
from .data import unigram_entropy
from .model import generate
from .output import say
from .report import Progress, final_table
from .session import Outcome, RankReport
from .setup import Setup, make_setup
from .trainer import Trainer
from .world import INTERRUPTED, StopFlag, World, choose_device, join_world, local_ranks

_SAMPLE_PROMPT = 32  # bytes
_SAMPLE_LENGTH = 400  # bytes


def train(request: TrainRequest) -> int:
    """Train as requested. Returns the exit code: 0, or 130 when interrupted. Raises UsageError, on every rank alike."""
    device = choose_device(request.given.get("device"), local_ranks())
    with join_world(device) as world:
        stop = StopFlag()
        setup = make_setup(request, world)
        trainer = Trainer(setup, world)
        try:
            if world.leads:
                if setup.own_folder:
                    setup.run_dir.rewind(trainer.steps_done)
                _print_header(trainer, setup, world)
            if trainer.steps_done >= setup.config.steps:
                if world.leads:
                    say(f"all {setup.config.steps} steps are done; a larger --steps goes on")
                return 0
            return _train_on(trainer, setup, world, stop)
        finally:
            trainer.optimizer.close()


def _train_on(trainer: Trainer, setup: Setup, world: World, stop: StopFlag) -> int:
    """Run the steps that are left, or until a rank is asked to stop. Returns the exit code."""
    account = open_account(trainer, setup, world, _facts(trainer, setup, world)) if world.leads else None
    begun_after = trainer.steps_done
    try:
        with trainer.tracker:
            stopped_at = _run_steps(trainer, setup, world, stop)
        last = setup.config.steps if stopped_at is None else stopped_at
        reports = world.comm.gather_objects(trainer.report(last - begun_after), "the last report")
        if stopped_at is None:
            _finish(trainer, setup, world, reports, account)
            return 0
        if account:
            account.end(Outcome.INTERRUPTED, stopped_at, reports)
            say(write_page(setup.run_dir))
            go_on = f"go on with --resume {setup.run_dir.path}" if setup.config.checkpoint else "nothing was saved"
            say(f"interrupted after step {stopped_at}; {go_on}")
        return INTERRUPTED
    except Exception as error:
        if account:
            account.fail(error)
        raise


def _run_steps(trainer: Trainer, setup: Setup, world: World, stop: StopFlag) -> int | None:
    """Train to the last step, and save. Returns the step at which the ranks agreed to stop, if they did."""
    config = setup.config
    scaled = config.dtype == "fp16"
    progress = Progress(trainer.steps_done, config.steps, scaled=scaled) if world.leads else None
    try:
        for step in range(trainer.steps_done + 1, config.steps + 1):
            outcome = trainer.step(step, asked_to_stop=bool(stop))
            if progress:
                setup.run_dir.write_step(outcome.record)
                progress.show(outcome.record)
            last = outcome.stop or step == config.steps
            if config.checkpoint and (last or (config.save_every and step % config.save_every == 0)):
                trainer.save(setup.run_dir.checkpoints, step)
            if outcome.stop and step < config.steps:
                return step
    finally:
        if progress:
            progress.close()
    return None


def _finish(
    trainer: Trainer, setup: Setup, world: World, reports: Sequence[RankReport], account: Account | None
) -> None:
    """Validate on every rank; rank 0 then reports and draws."""
    if world.leads:
        say("validating and sampling")
    validation_loss = trainer.validation_loss()
    with gather_parameters(trainer.model):  # whatever the stage
        if world.leads:
            _write_sample(trainer, setup)
    if account is None:
        return
    entropy = unigram_entropy(setup.corpus.validation)
    account.end(Outcome.FINISHED, setup.config.steps, reports, Validation(validation_loss, entropy))
    _tell(trainer, setup, world, reports, Validation(validation_loss, entropy))


def _tell(trainer: Trainer, setup: Setup, world: World, reports: Sequence[RankReport], validation: Validation) -> None:
    table = final_table(reports, trainer.planned(), on_gpu=world.device.type == "cuda")
    say(f"\n{table}\n")
    if problem := draw_losses(setup.run_dir):
        say(problem)
    say(f"validation loss {validation.loss:.4f}")
    say(f"unigram entropy {validation.entropy:.4f}")
    say("  nats per byte of held-out text; the entropy is of that text's own byte counts")
    say(write_page(setup.run_dir))
    say(f"written to {setup.run_dir.path}")


def _write_sample(trainer: Trainer, setup: Setup) -> None:
    prompt = setup.corpus.validation[:_SAMPLE_PROMPT].long()
    text = generate(trainer.model, prompt, _SAMPLE_LENGTH, seed=setup.config.seed)
    (setup.run_dir.path / "sample.txt").write_bytes(bytes(text.tolist()))


def _print_header(trainer: Trainer, setup: Setup, world: World) -> None:
    config = setup.config
    gpus = torch.cuda.device_count()
    if config.device == "cpu" and 0 < gpus < local_ranks():
        say(f"{local_ranks()} ranks and {gpus} GPUs on this machine: training on the CPU")
    if config.dtype == "fp16" and config.device == "cpu":
        say("fp16 on a CPU: matrix products are about 60 times slower than in bf16, so the default model is tiny")
    for name, fact in _facts(trainer, setup, world).items():
        say(f"{name:<6} {fact}")
    resumed = f", after step {trainer.steps_done}" if setup.saved else ""
    say(f"run    {setup.run_dir.path}, process {os.getpid()}{resumed}")


def _facts(trainer: Trainer, setup: Setup, world: World) -> dict[str, str]:
    """Describe what is run, for the header and for ``run.json``."""
    config, text = setup.config, setup.corpus
    shape = f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, window of {config.seq} bytes"
    each = f"{torch.get_num_threads()} threads" if config.device == "cpu" else torch.cuda.get_device_name(world.device)
    units = f": {config.layers} blocks, each gathered when it is used" if config.stage >= 3 and world.size > 1 else ""
    ranks = f"{world.size} on {config.device} ({world.backend or 'no process group'}, {each})"
    return {
        "model": f"{trainer.parameters():,} parameters in {config.dtype}: {shape}",
        "data": f"{text.name}: {text.train.numel():,} bytes to train on, {text.validation.numel():,} held out",
        "ranks": f"{ranks}, stage {config.stage}{units}",
    }
