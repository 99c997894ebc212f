"""A run from start to end: steps, logs, checkpoints, validation, and what is written and printed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from zero_optim_cli import distribution_version, say

from .. import memory
from ..figures import short
from ..gather_parameters import gather_parameters
from .config import TrainRequest
from .data import unigram_entropy
from .model import generate
from .page import LOG, PAGE, PICTURE, draw_loss, tables, write_page
from .run_dir import Setup, make_setup
from .trainer import Trainer, finite
from .world import INTERRUPTED, StopFlag, World, choose_device, join_world, local_ranks

_SAMPLE_PROMPT = 32  # bytes
_SAMPLE_LENGTH = 400  # bytes
_SECONDS_BETWEEN_LINES = 10.0  # of the progress bar, where stderr is no terminal


def train(request: TrainRequest) -> int:
    """Train as requested. Returns the exit code: 0, or 130 when interrupted. Raises UsageError, on every rank alike."""
    with join_world(choose_device(request.given.get("device"), local_ranks())) as world:
        stop = StopFlag()
        setup = make_setup(request, world)
        trainer = Trainer(setup.config, setup.corpus, world)
        try:
            if setup.source:
                trainer.load(setup.source)
            if world.leads:
                if setup.in_place:
                    setup.run_dir.rewind(trainer.steps_done)
                _print_header(trainer, setup, world)
            if trainer.steps_done < setup.config.steps:
                return _train_on(trainer, setup, world, stop)
            if world.leads:
                say(f"all {setup.config.steps} steps are done; a larger --steps goes on")
            return 0
        finally:
            trainer.optimizer.close()


def _train_on(trainer: Trainer, setup: Setup, world: World, stop: StopFlag) -> int:
    """Run the steps that are left, or until a rank is asked to stop. Returns the exit code."""
    begun_after, begun = trainer.steps_done, time.perf_counter()
    start = start_of(trainer, setup, world)
    if world.leads:
        setup.run_dir.write_sessions([*setup.run_dir.sessions(), start])

    def end(outcome: str, **more: Any) -> Mapping[str, Any]:
        seconds = time.perf_counter() - begun
        ended = {**start, "ending": {"outcome": outcome, "step": trainer.steps_done, "seconds": seconds, **more}}
        setup.run_dir.write_sessions([*setup.run_dir.sessions()[:-1], ended])
        return ended

    try:
        with trainer.tracker:
            _run_steps(trainer, setup, world, stop)
        reports = world.comm.gather_objects(trainer.report(trainer.steps_done - begun_after), "the last report")
        if trainer.steps_done < setup.config.steps:
            if world.leads:
                end("interrupted", ranks=reports)
                _write(write_page, PAGE, setup)
                go_on = f"go on with --resume {setup.run_dir.path}" if setup.config.checkpoint else "nothing was saved"
                say(f"interrupted after step {trainer.steps_done}; {go_on}")
            return INTERRUPTED
        loss = _validate(trainer, setup, world)
        if world.leads:
            entropy = unigram_entropy(setup.corpus.validation)
            _print_end(end("finished", ranks=reports, validation_loss=finite(loss), entropy=entropy), setup)
        return 0
    except Exception as error:
        if world.leads:
            with contextlib.suppress(OSError):  # as of a full disk: ``error`` is the one to report
                end("failed", ranks=[], why=f"{type(error).__name__}: {error}")
        raise


def start_of(trainer: Trainer, setup: Setup, world: World) -> dict[str, Any]:
    """Make this start's entry of ``run.json``, without its end.

    ``after_step``: the step that was resumed from, 0 for a fresh run. ``plan``: by formula, bytes of the mean rank by
    kind, and bytes that it communicates in a step by collective.
    """
    planned = memory.plan_of(trainer.optimizer, mean=True, accumulate=setup.config.accumulate)
    versions = {"zero-optim": distribution_version(), "torch": torch.__version__, "python": platform.python_version()}
    return {
        "started": datetime.now().astimezone().isoformat(),
        "after_step": trainer.steps_done,
        "resumed_from": str(setup.resumed_from) if setup.resumed_from else None,
        "command": setup.command,
        "facts": {**_facts(trainer, setup, world), **versions},
        "config": asdict(setup.config),
        "parameters": planned.model.numel,
        "peak_of": "allocated by torch on a GPU" if world.device.type == "cuda" else "resident memory of a process",
        "plan": {"memory": {**planned.memory}, "traffic": {**planned.traffic}, "state_kinds": planned.state_kinds},
        "ending": None,
    }


def _run_steps(trainer: Trainer, setup: Setup, world: World, stop: StopFlag) -> None:
    """Train to the last step, or to the one at which some rank is asked to stop, and save."""
    config = setup.config
    log = Log(setup.run_dir.path, trainer.steps_done, config.steps) if world.leads else None
    try:
        for step in range(trainer.steps_done + 1, config.steps + 1):
            record, stopped = trainer.step(step, asked_to_stop=bool(stop))
            trainer.steps_done = step
            if log:
                log.write(record)
            last = stopped or step == config.steps
            if config.checkpoint and (last or (config.save_every and step % config.save_every == 0)):
                trainer.save(setup.run_dir.checkpoints, step)
            if stopped:
                return
    finally:
        if log:
            log.close()


class Log:
    """``log.jsonl``, TensorBoard's files, and a progress bar. Without its package, either of the latter is left out."""

    def __init__(self, folder: Path, done: int, steps: int) -> None:
        self._file = (folder / LOG).open("a", buffering=1)  # a process that dies in the next step loses no line
        self._board = self._bar = None
        if tensorboard := _optional("torch.utils.tensorboard", "tensorboard"):
            self._board = tensorboard.SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        if tqdm := _optional("tqdm", "tqdm"):
            every = 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
            self._bar = tqdm.tqdm(initial=done, total=steps, unit="step", dynamic_ncols=True, mininterval=every)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        if self._board:
            times = {f"ms/{phase}": ms for phase, ms in record["ms"].items()}
            for name, value in {**record, **times, **record.get("telemetry", {})}.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(name, value, record["step"])
        if self._bar is not None:
            scale = f", scale {record['loss_scale']:g}" if record["loss_scale"] != 1 else ""
            figures = f"loss {short(record['loss'])}, norm {short(record['grad_norm'])}{scale}"
            self._bar.set_postfix_str(f"{figures}, {record['tokens_per_s']:,.0f} tokens/s", refresh=False)
            self._bar.update()

    def close(self) -> None:
        for one in (self._file, self._board, self._bar):
            if one is not None:
                one.close()


def _optional(module: str, package: str) -> Any:
    """Import a module of the extra ``train``. Print a line and return None where it is missing."""
    try:
        return import_module(module)
    except ImportError:
        say(f"{package} is not installed, and is left out; pip install zero-kernels[train]")
        return None


def _validate(trainer: Trainer, setup: Setup, world: World) -> float:
    """Collective. Return the loss of the held-out text; rank 0 writes a sample."""
    if world.leads:
        say("validating and sampling")
    loss = trainer.validation_loss()
    with gather_parameters(trainer.model):
        if world.leads:
            prompt = setup.corpus.validation[:_SAMPLE_PROMPT].long()
            text = generate(trainer.model, prompt, _SAMPLE_LENGTH, seed=setup.config.seed)
            (setup.run_dir.path / "sample.txt").write_bytes(bytes(text.tolist()))
    return loss


def _print_end(session: Mapping[str, Any], setup: Setup) -> None:
    say("", "\n\n".join(table.as_text() for table in tables(session)), "")
    _write(draw_loss, PICTURE, setup)
    loss, entropy = session["ending"]["validation_loss"], session["ending"]["entropy"]
    say(f"validation loss {'not finite' if loss is None else f'{loss:.4f}'}")
    say(f"unigram entropy {entropy:.4f}")
    say("  nats per byte of held-out text; the entropy is of that text's own byte counts")
    if page := _write(write_page, PAGE, setup):
        say(f"page of the run: {page}")
    say(f"written to {setup.run_dir.path}")


def _write(write: Callable[[Path], Path], name: str, setup: Setup) -> Path | None:
    """Write a file of the run. A failure is printed, and fails no training."""
    try:
        return write(setup.run_dir.path)
    except Exception as error:
        remedy = "; pip install zero-kernels[train]" if isinstance(error, ImportError) else ""
        say(f"{name} was not written: {type(error).__name__}: {error}{remedy}")
        return None


def _print_header(trainer: Trainer, setup: Setup, world: World) -> None:
    config = setup.config
    gpus = torch.cuda.device_count()
    if config.device == "cpu" and 0 < gpus < local_ranks():
        say(f"{local_ranks()} ranks and {gpus} GPUs on this machine: training on the CPU")
    if config.dtype == "fp16" and config.device == "cpu":
        say("fp16 on a CPU: matrix products are about 60 times slower than in bf16, so the default model is tiny")
    for name, fact in _facts(trainer, setup, world).items():
        say(f"{name:<6} {fact}")
    resumed = f", after step {trainer.steps_done}" if setup.source else ""
    say(f"run    {setup.run_dir.path}, process {os.getpid()}{resumed}")


def _facts(trainer: Trainer, setup: Setup, world: World) -> dict[str, str]:
    """Describe what is run, for the header, ``run.json`` and the page."""
    config, text = setup.config, setup.corpus
    shape = f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, window of {config.seq} bytes"
    each = f"{torch.get_num_threads()} threads" if config.device == "cpu" else torch.cuda.get_device_name(world.device)
    units = f": {config.layers} blocks, each gathered when it is used" if config.stage >= 3 and world.size > 1 else ""
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {
        "model": f"{parameters:,} parameters in {config.dtype}: {shape}",
        "data": f"{text.name}: {text.train.numel():,} bytes to train on, {text.validation.numel():,} held out",
        "ranks": f"{world.size} on {config.device} ({backend}, {each}), stage {config.stage}{units}",
    }
