"""What a run leaves on disk: a log, a plot, a sample, and checkpoints of one file a rank plus the model.

::

    RUN_DIR/log.jsonl  loss.png  sample.txt
    RUN_DIR/checkpoint/latest                       name of the newest complete checkpoint
    RUN_DIR/checkpoint/step-000500/model.pt         rank 0: the model's state dict
    RUN_DIR/checkpoint/step-000500/rank-0-of-2.pt   each rank: optimizer, scaler, schedule, random states, step, config
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .config import UsageError

_CHECKPOINTS = "checkpoint"
_LATEST = "latest"
_LOG = "log.jsonl"
_STEP_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class StepRecord:
    """A line of ``log.jsonl``. ``grad_norm``: of the averaged gradients before clipping. None: not finite."""

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    loss_scale: float
    tokens_per_s: float


class RunDir:
    """The folder of one run. Every rank may read; only rank 0 makes it and logs to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def default_name(label: str) -> Path:
        """``runs/<date>-<label>``, numbered where that is taken."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
        names = [stem, *(f"{stem}-{number}" for number in range(2, 100))]
        return next(path for path in (Path("runs", name) for name in names) if not path.exists())

    def create(self) -> None:
        """Makes the folder for a new run. Raises UsageError where it can't be written or already holds a run."""
        if (self.path / _LOG).exists() or (self.path / _CHECKPOINTS).exists():
            raise UsageError(
                f"--out {self.path} already holds a run: give another folder, or continue it with --resume"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / _LOG).touch()
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from error

    def rewind(self, step: int) -> None:
        """Forgets what the log and the checkpoints hold of later steps, so that the run goes on from ``step``."""
        log = self.path / _LOG
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        _write_atomically(log, lambda temporary: temporary.write_text("".join(kept)))
        self._mark_latest(step)
        for folder in self._checkpoint(step).parent.glob("step-*"):
            if _step_of(folder) > step:
                shutil.rmtree(folder)

    def open_log(self) -> LogFile:
        return LogFile(self.path / _LOG)

    def read_log(self) -> list[StepRecord]:
        return [StepRecord(**json.loads(line)) for line in (self.path / _LOG).read_text().splitlines()]

    def save_part(self, step: int, name: str, content: dict[str, Any]) -> None:
        """Writes one file of a checkpoint. The checkpoint counts only once ``complete`` was called."""
        folder = self._checkpoint(step)
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(folder / name, lambda temporary: torch.save(content, temporary))

    def complete(self, step: int) -> Path:
        """Makes the checkpoint of ``step`` the one to resume from, after every rank has saved its part."""
        self._mark_latest(step)
        return self._checkpoint(step)

    def _mark_latest(self, step: int) -> None:
        marker = self._checkpoint(step).parent / _LATEST
        marker.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(marker, lambda temporary: temporary.write_text(self._checkpoint(step).name + "\n"))

    def _checkpoint(self, step: int) -> Path:
        return self.path / _CHECKPOINTS / f"step-{step:06d}"


class LogFile:
    """``log.jsonl``, one object a line, each on disk before the next step starts."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint to resume from; ``run_dir`` is the folder that it was found in."""

    folder: Path
    run_dir: Path

    def load(self, rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's state dict and this rank's own part, on the CPU. Raises UsageError where there are none."""
        saved = sorted(self.folder.glob("rank-*-of-*.pt"))
        name = rank_part(rank, world_size)
        if saved and not (self.folder / name).exists():
            ranks = saved[0].stem.rpartition("-")[2]
            raise UsageError(
                f"--resume {self.folder}: saved by {ranks} ranks, this run has {world_size}; start {ranks} to resume"
            )
        return _load(self.folder / "model.pt"), _load(self.folder / name)


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that ``path`` (a run directory, or one of its checkpoints) stands for. Raises UsageError."""
    if _STEP_NAME.fullmatch(path.name):
        return Checkpoint(path, path.resolve().parent.parent)
    run_dir = path.parent if path.name == _CHECKPOINTS else path
    marker = run_dir / _CHECKPOINTS / _LATEST
    if not marker.is_file():
        raise UsageError(f"--resume {path}: holds no complete checkpoint")
    return Checkpoint(marker.parent / marker.read_text().strip(), run_dir)


def rank_part(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}.pt"


def _load(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(f"--resume {file}: no such file; the checkpoint is incomplete") from error
    except Exception as error:  # torch reports a damaged file by many types
        raise UsageError(f"--resume {file}: can't be read ({str(error).splitlines()[0]})") from error


def _step_of(folder: Path) -> int:
    match = _STEP_NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """The file is either the old one or the whole new one, whenever this process dies."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
