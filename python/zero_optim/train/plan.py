"""What the ranks agree on before training: the run, its data, its folder, and what they resume from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..comm.collectives import Comm
from .config import TrainConfig, TrainRequest, UsageError, fresh_config, resumed_config
from .data import Corpus, load_corpus
from .run_dir import Checkpoint, RunDir, find_checkpoint
from .world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """What a rank resumes from, on the CPU: the model's state dict and its own part of the checkpoint."""

    checkpoint: Checkpoint
    weights: dict[str, Any]
    part: dict[str, Any]

    @property
    def step(self) -> int:
        return self.part["step"]


@dataclass(frozen=True)
class Plan:
    """One run. ``saved`` is None for a fresh one."""

    config: TrainConfig
    corpus: Corpus
    run_dir: RunDir
    saved: Saved | None

    @property
    def steps_done(self) -> int:
        return self.saved.step if self.saved else 0


def together(comm: Comm, work: Callable[[], T]) -> T:
    """Does ``work`` on every rank; where it is a UsageError on any, raises that of the lowest such rank on all."""
    try:
        result, problem = work(), None
    except UsageError as error:
        result, problem = None, str(error)
    problems = [other for other in comm.gather_objects(problem, "work done together") if other is not None]
    if problems:
        raise UsageError(problems[0])
    return result  # type: ignore[return-value]


def make_plan(request: TrainRequest, world: World) -> Plan:
    """Reads checkpoint and data on every rank, makes the run directory on rank 0. Raises UsageError, on all alike."""
    config, corpus, saved = together(world.comm, lambda: _read_inputs(request, world))
    path = together(world.comm, lambda: _open_run_dir(request, config, saved) if world.leads else None)
    return Plan(config, corpus, RunDir(world.comm.gather_objects(path, "the plan")[0]), saved)


def _read_inputs(request: TrainRequest, world: World) -> tuple[TrainConfig, Corpus, Saved | None]:
    device = world.device.type
    if request.resume is None:
        config = fresh_config(request.given, device)
        return config, load_corpus(config.data, config.seq), None
    checkpoint = find_checkpoint(request.resume)
    saved = Saved(checkpoint, *checkpoint.load(world.rank, world.size))
    config = resumed_config(saved.part["config"], request.given, device)
    if config.steps <= saved.step:
        raise UsageError(f"--resume {request.resume}: all {config.steps} steps are done; a larger --steps goes on")
    corpus = load_corpus(config.data, config.seq)
    if saved.part["data_digest"] != corpus.digest:
        raise UsageError(
            f"--resume {request.resume}: {corpus.name} is not the text that it was trained on; name that by --data"
        )
    return config, corpus, saved


def _open_run_dir(request: TrainRequest, config: TrainConfig, saved: Saved | None) -> Path:
    out = request.given.get("out")
    if saved is not None and (out is None or Path(out).resolve() == saved.checkpoint.run_dir.resolve()):
        RunDir(saved.checkpoint.run_dir).rewind(saved.step)
        return saved.checkpoint.run_dir
    path = Path(out) if out is not None else RunDir.default_name(f"{config.dtype}-stage{config.stage}")
    RunDir(path).create()
    return path


def read_random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """torch's generators, of the CPU and of this rank's GPU, as uint8 tensors."""
    states = {"cpu": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
