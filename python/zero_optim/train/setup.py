"""The set-up that ranks agree on before training: flags, data, run directory, and the checkpoint to resume from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import checkpoint
from ..checkpoint.folder import checkpoints
from ..checkpoint.rank_file import crc32c
from ..comm.together import on_rank_0, together
from ..errors import CheckpointError, UsageError
from .config import RESUME_AUTO, TrainConfig, TrainRequest, fresh_config, resumed_config
from .data import Corpus, load_corpus
from .output import say
from .run_dir import RunDir, find_checkpoint
from .world import World

WHERE = "the set-up"


@dataclass(frozen=True)
class Saved:
    """The checkpoints that a run resumes from.

    Attributes:
        source: one checkpoint, or the folder of all, of which the newest whole one is loaded.
        run_dir: the run directory that ``source`` is in.
        info: that of the checkpoint; of several, that of the newest.
    """

    source: Path
    run_dir: Path
    info: checkpoint.Info

    def is_in(self, run_dir: RunDir) -> bool:
        return run_dir.path.resolve() == self.run_dir.resolve()


@dataclass(frozen=True)
class Setup:
    """One run. ``saved`` is None for a fresh one. ``command``: what was typed."""

    config: TrainConfig
    corpus: Corpus
    run_dir: RunDir
    saved: Saved | None
    command: str

    @property
    def own_folder(self) -> bool:
        """True if the run goes on in the run directory that holds its checkpoint."""
        return self.saved is not None and self.saved.is_in(self.run_dir)


def make_setup(request: TrainRequest, world: World) -> Setup:
    """Collective. Read checkpoint and data on all ranks, make the run directory on rank 0. Raises UsageError on all."""
    config, corpus, saved = together(world.comm, lambda: _read_inputs(request, world), WHERE)
    path = on_rank_0(world.comm, lambda: _open_run_dir(request, config, saved), WHERE)
    return Setup(config, corpus, RunDir(path), saved, request.command)


def _read_inputs(request: TrainRequest, world: World) -> tuple[TrainConfig, Corpus, Saved | None]:
    device = world.device.type
    saved = _find(request)
    if saved is None:
        config = fresh_config(request.given, device)
        if config.checkpoint:
            _check_can_save()
        if world.leads and config.dtype != request.given.get("dtype", TrainConfig.dtype):
            say(f"{config.dtype}: no bf16 units in this {device.upper()}; --dtype bf16 emulates them, slowly")
        return config, _read_text(config, world), None
    if not isinstance(saved.info.extra, dict) or "config" not in saved.info.extra:
        raise UsageError(f"--resume {saved.info.folder}: was not written by zero-optim train")
    config = resumed_config(saved.info.extra["config"], request.given, device)
    if config.steps <= saved.info.step and request.resume != RESUME_AUTO:
        raise UsageError(f"--resume {request.resume}: all {config.steps} steps are done; a larger --steps goes on")
    corpus = _read_text(config, world)
    if saved.info.extra["data_digest"] != corpus.digest:
        raise UsageError(
            f"--resume {request.resume}: {corpus.name} is not the text that it was trained on; name that by --data"
        )
    return config, corpus, saved


def _read_text(config: TrainConfig, world: World) -> Corpus:
    if world.leads:
        say("reading the text")
    return load_corpus(config.data, config.seq)


def _check_can_save() -> None:
    """Raise UsageError where no checkpoint can be written: now, and not after the last step."""
    try:
        crc32c(b"")  # its package may be missing
    except CheckpointError as error:
        raise UsageError(f"{error}, or give --no-checkpoint") from error


def _find(request: TrainRequest) -> Saved | None:
    if request.resume is None:
        return None
    try:
        if request.resume == RESUME_AUTO:
            run_dir = Path(request.given["out"]).absolute()
            source = RunDir(run_dir).checkpoints
            if not checkpoints(source):
                return None
        else:
            source, run_dir = find_checkpoint(request.resume.absolute())
        return Saved(source, run_dir, checkpoint.info(source))
    except CheckpointError as error:
        raise UsageError(f"--resume {request.resume}: {error}") from error


def _open_run_dir(request: TrainRequest, config: TrainConfig, saved: Saved | None) -> Path:
    """Choose the run directory, and make it unless it holds the checkpoint."""
    default = saved.run_dir if saved else RunDir.default_name(f"{config.dtype}-stage{config.stage}")
    run_dir = RunDir(Path(request.given.get("out", default)))
    if saved is None or not saved.is_in(run_dir):
        if request.resume == RESUME_AUTO:
            run_dir.create_anew()
        else:
            run_dir.create()
    return run_dir.path
