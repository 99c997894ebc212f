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
        ms: of rank 0, by phase, and of the ``whole`` step; on a CPU also how long it was blocked on communication,
            which is inside phases. None in logs of earlier versions.
        telemetry: with ``--telemetry``, of each parameter that the step has updated ``grad_norm/NAME`` and so on.
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
        """``runs/<date>-<label>``, numbered where that is taken."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
        names = [stem, *(f"{stem}-{number}" for number in range(2, 100))]
        return next(path for path in (Path("runs", name) for name in names) if not path.exists())

    def create(self) -> None:
        """Makes the folder for a new run. Raises UsageError where it can't be written or already holds a run."""
        if (self.path / LOG).exists() or self.checkpoints.exists():
            raise UsageError(
                f"--out {self.path} already holds a run: give another folder, or continue it with --resume"
            )
        self.create_anew()

    def create_anew(self) -> None:
        """Makes the folder; the log of a run that died before its first checkpoint is emptied. Raises UsageError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOG).write_text("")
            (self.path / RUN).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from error

    def rewind(self, step: int) -> None:
        """Forgets what the log and the checkpoints hold of later steps, so that the run goes on from ``step``.

        Raises CheckpointError where one cannot be removed.
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
        """Add a line to the log, which is with the system before the next step starts."""
        with (self.path / LOG).open("a") as file:
            said = {name: value for name, value in asdict(record).items() if name != "telemetry" or value is not None}
            file.write(json.dumps(said) + "\n")

    def read_log(self) -> list[StepRecord]:
        """All whole lines: the last one of a run that is under way may not be. Raises UsageError."""
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
        """Every start of this run, the first one first; none for a run of an earlier version. Raises UsageError."""
        file = self.path / RUN
        try:
            return sessions_from_text(file.read_text()) if file.exists() else []
        except ValueError as error:
            raise UsageError(f"{file}: {error}") from error

    def write_session(self, session: Session) -> None:
        """Write the session in the place of the last one, where that is the same start; else after it."""
        others = self.sessions()
        if others and others[-1].started == session.started:
            others.pop()
        self._write_sessions([*others, session])

    def _write_sessions(self, sessions: Sequence[Session]) -> None:
        folders.write_atomically(self.path / RUN, sessions_to_text(sessions))


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Resolve ``path``, a run directory or something in it, to what is loaded and the run directory.

    To be loaded from is one checkpoint, or the folder of all. Raises UsageError where there is none, CheckpointError
    where the system does not let it be seen.
    """
    if folders.step_of(path) is not None:
        return path, path.resolve().parent.parent
    run_dir = path.parent if path.name == _CHECKPOINTS else path
    if not folders.checkpoints(run_dir / _CHECKPOINTS):
        raise UsageError(f"--resume {path}: holds no complete checkpoint")
    return run_dir / _CHECKPOINTS, run_dir
