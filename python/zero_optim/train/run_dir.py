"""The folder of a run, and the set-up that the ranks agree on before training: flags, text, run directory, checkpoint.

::

    RUN_DIR/log.jsonl  run.json  report.html  loss.png  sample.txt  tensorboard/
    RUN_DIR/checkpoint/step-500/    see ``zero_optim.checkpoint``
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_optim_cli import say

from .. import checkpoint
from ..checkpoint import folder as folders
from ..checkpoint.rank_file import crc32c
from ..comm.together import on_rank_0, together
from ..errors import CheckpointError, UsageError
from .config import RESUME_AUTO, TrainConfig, TrainRequest, fresh_config, resumed_config
from .data import Corpus, load_corpus
from .page import LOG, RUN
from .world import World

_CHECKPOINTS = "checkpoint"
_WHERE = "the set-up"


class RunDir:
    """The folder of one run. Every rank may read; only rank 0 makes it and writes to it.

    Attributes:
        path: absolute. The process may go elsewhere before the run is over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / _CHECKPOINTS

    def create(self, *, anew: bool) -> None:
        """Make the folder for a new run. Raises UsageError where it can't be written or already holds a run.

        With ``anew``, the log of a run that died before its first checkpoint is cleared instead.
        """
        if not anew and ((self.path / LOG).exists() or self.checkpoints.exists()):
            remedy = "give another folder, or continue it with --resume"
            raise UsageError(f"--out {self.path} already holds a run: {remedy}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOG).write_text("")
            (self.path / RUN).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from error

    def rewind(self, step: int) -> None:
        """Remove the log lines and checkpoints of later steps. Raises CheckpointError where one cannot be removed."""
        log = self.path / LOG
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        folders.write_atomically(log, "".join(kept))
        for folder in folders.checkpoints(self.checkpoints):
            if (folders.step_of(folder) or 0) > step:
                folders.remove(folder)

    def sessions(self) -> list[Mapping[str, Any]]:
        """Read every start of this run, in order. Raises UsageError for a damaged file."""
        file = self.path / RUN
        try:
            return json.loads(file.read_text())["sessions"] if file.exists() else []
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}: is not as zero-optim train writes it ({error}); remove it to go on") from error

    def write_sessions(self, sessions: Sequence[Mapping[str, Any]]) -> None:
        folders.write_atomically(self.path / RUN, json.dumps({"sessions": sessions}, indent=1) + "\n")


@dataclass(frozen=True)
class Setup:
    """One run.

    Attributes:
        command: what was typed.
        source: what it resumes from: a checkpoint, or a folder of which the newest whole one is loaded. None: nothing.
    """

    config: TrainConfig
    corpus: Corpus
    run_dir: RunDir
    command: str
    source: Path | None

    @property
    def resumed_from(self) -> Path | None:
        return _run_dir_of(self.source) if self.source else None

    @property
    def in_place(self) -> bool:
        """True if the run goes on in the run directory that holds its checkpoint."""
        return self.resumed_from is not None and self.resumed_from.resolve() == self.run_dir.path.resolve()


def make_setup(request: TrainRequest, world: World) -> Setup:
    """Collective. Read checkpoint and data on all ranks, make the run directory on rank 0. Raises UsageError on all."""
    config, corpus, source = together(world.comm, lambda: _read_inputs(request, world), _WHERE)
    dated = Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{config.dtype}-stage{config.stage}")
    out = Path(request.given["out"]) if "out" in request.given else _run_dir_of(source) if source else dated

    def open_folder() -> Path:
        setup = Setup(config, corpus, RunDir(out), request.command, source)
        if setup.in_place:
            setup.run_dir.sessions()  # raises for a damaged run.json, here on all ranks
        else:
            setup.run_dir.create(anew=request.resume == RESUME_AUTO)
        return setup.run_dir.path

    path = on_rank_0(world.comm, open_folder, _WHERE)  # rank 0's clock names the folder
    return Setup(config, corpus, RunDir(path), request.command, source)


def _read_inputs(request: TrainRequest, world: World) -> tuple[TrainConfig, Corpus, Path | None]:
    try:
        source = _find_checkpoint(request)
        saved = checkpoint.info(source) if source else None
    except CheckpointError as error:
        raise UsageError(f"--resume {request.resume}: {error}") from error
    config = _resumed(request, world, saved) if saved else _fresh(request, world)
    if world.leads:
        say("reading the text")
    corpus = load_corpus(config.data, config.seq)
    if saved and saved.extra["data_digest"] != corpus.digest:
        what = f"{corpus.name} is not the text that it was trained on; name that by --data"
        raise UsageError(f"--resume {request.resume}: {what}")
    return config, corpus, source


def _fresh(request: TrainRequest, world: World) -> TrainConfig:
    device = world.device.type
    config = fresh_config(request.given, device)
    if config.checkpoint:
        try:
            crc32c(b"")  # its package may be missing: that is better known now than after the last step
        except CheckpointError as error:
            raise UsageError(f"{error}, or give --no-checkpoint") from error
    if world.leads and config.dtype != request.given.get("dtype", TrainConfig.dtype):
        say(f"{config.dtype}: no bf16 units in this {device.upper()}; --dtype bf16 emulates them, slowly")
    return config


def _resumed(request: TrainRequest, world: World, saved: checkpoint.Info) -> TrainConfig:
    if not isinstance(saved.extra, dict) or "config" not in saved.extra:
        raise UsageError(f"--resume {saved.folder}: was not written by zero-optim train")
    config = resumed_config(saved.extra["config"], request.given, world.device.type)
    if config.steps <= saved.step and request.resume != RESUME_AUTO:
        raise UsageError(f"--resume {request.resume}: all {config.steps} steps are done; a larger --steps goes on")
    return config


def _find_checkpoint(request: TrainRequest) -> Path | None:
    """Find what to resume from. ``--resume`` names a run directory, its folder of checkpoints, or one of them."""
    if request.resume is None:
        return None
    auto = request.resume == RESUME_AUTO
    path = Path(request.given["out"] if auto else request.resume).absolute()
    if not auto and folders.step_of(path) is not None:
        return path
    source = path if path.name == _CHECKPOINTS else path / _CHECKPOINTS
    if folders.checkpoints(source):
        return source
    if auto:
        return None
    raise UsageError(f"--resume {path}: holds no complete checkpoint")


def _run_dir_of(source: Path) -> Path:
    return source.parent if folders.step_of(source) is None else source.resolve().parent.parent
