"""The folder of a run: a log, what was run, a page, a plot, a sample, and checkpoints.

::

    RUN_DIR/log.jsonl  run.json  report.html  loss.png  sample.txt
    RUN_DIR/checkpoint/step-500/    see ``zero_optim.checkpoint``
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..checkpoint import folder as folders
from ..errors import UsageError
from .session import Session, sessions_from_text, sessions_to_text, taken_back

_CHECKPOINTS = "checkpoint"
LOG = "log.jsonl"
RUN = "run.json"
PAGE = "report.html"


@dataclass(frozen=True)
class StepRecord:
    """A line of ``log.jsonl``.

    Attributes:
        grad_norm: of the averaged gradients before clipping. None: not finite.
        ms: of rank 0, by phase, and of the ``whole`` step; on a CPU also the time blocked on communication, which is
            part of those phases. None in logs of earlier versions.
        telemetry: with ``--telemetry``: ``grad_norm/NAME`` and so on, for each parameter that the step updated.
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    loss_scale: float
    tokens_per_s: float
    ms: dict[str, float] | None = None
    telemetry: dict[str, float] | None = None


class RunDir:
    """The folder of one run. Every rank may read; only rank 0 makes it and logs to it.

    Attributes:
        path: absolute. The process may go elsewhere before the run is over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / _CHECKPOINTS

    @staticmethod
    def default_name(label: str) -> Path:
        """Choose ``runs/<date>-<label>``, with a number behind it where that exists."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
        names = [stem, *(f"{stem}-{number}" for number in range(2, 100))]
        return next(path for path in (Path("runs", name) for name in names) if not path.exists())

    def create(self) -> None:
        """Make the folder for a new run. Raises UsageError where it can't be written or already holds a run."""
        if (self.path / LOG).exists() or self.checkpoints.exists():
            raise UsageError(
                f"--out {self.path} already holds a run: give another folder, or continue it with --resume"
            )
        self.create_anew()

    def create_anew(self) -> None:
        """Make the folder, and clear the log of a run that died before its first checkpoint. Raises UsageError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOG).write_text("")
            (self.path / RUN).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from error

    def rewind(self, step: int) -> None:
        """Remove the log lines and checkpoints of later steps, so that the run goes on from ``step``.

        Raises CheckpointError where a checkpoint cannot be removed.
        """
        log = self.path / LOG
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        folders.write_atomically(log, "".join(kept))
        self._write_sessions(taken_back(self.sessions(), step))
        for folder in folders.checkpoints(self.checkpoints):
            if (folders.step_of(folder) or 0) > step:
                folders.remove(folder)

    def write_step(self, record: StepRecord) -> None:
        """Append a line to the log, and close it: a process that dies in the next step loses no line."""
        with (self.path / LOG).open("a") as file:
            said = {name: value for name, value in asdict(record).items() if name != "telemetry" or value is not None}
            file.write(json.dumps(said) + "\n")

    def read_log(self) -> list[StepRecord]:
        """Read all complete lines: the last line of a run that is under way may be cut off. Raises UsageError."""
        records = []
        for number, line in enumerate((self.path / LOG).read_text().splitlines(keepends=True), start=1):
            if not line.endswith("\n"):
                break
            try:
                records.append(StepRecord(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{self.path / LOG}: line {number} is no step of a run ({error})") from error
        return records

    def sessions(self) -> list[Session]:
        """Read every start of this run, in order; none for a run of an earlier version. Raises UsageError."""
        file = self.path / RUN
        try:
            return sessions_from_text(file.read_text()) if file.exists() else []
        except ValueError as error:
            raise UsageError(f"{file}: {error}") from error

    def write_session(self, session: Session) -> None:
        """Append the session, or replace the last one where that is the same start."""
        others = self.sessions()
        if others and others[-1].started == session.started:
            others.pop()
        self._write_sessions([*others, session])

    def _write_sessions(self, sessions: Sequence[Session]) -> None:
        folders.write_atomically(self.path / RUN, sessions_to_text(sessions))


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Resolve ``path``, a run directory or something in it, to the folder to load and the run directory.

    The folder to load is one checkpoint, or that of all. Raises UsageError where there is no checkpoint, and
    CheckpointError where the system does not let the folder be read.
    """
    if folders.step_of(path) is not None:
        return path, path.resolve().parent.parent
    run_dir = path.parent if path.name == _CHECKPOINTS else path
    if not folders.checkpoints(run_dir / _CHECKPOINTS):
        raise UsageError(f"--resume {path}: holds no complete checkpoint")
    return run_dir / _CHECKPOINTS, run_dir
