"""Rank 0's account of a run in its folder: what is run, how it ended, and a page of it."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import torch
from zero_optim_cli import distribution_version

from ..bench.record import commit, device_name
from ..drawing.sheet import Sheet
from .report import forecast
from .run_dir import PAGE, RunDir
from .session import Ending, Outcome, RankReport, Session
from .setup import Setup
from .trainer import Trainer
from .world import World


@dataclass(frozen=True)
class Validation:
    """Nats per byte of held-out text: the model's mean loss, and the entropy of the text's own byte counts."""

    loss: float
    entropy: float


class Account:
    """The last entry of ``run.json``: written when the session begins, and again when it ends."""

    def __init__(self, run_dir: RunDir, session: Session) -> None:
        self._run_dir, self._session, self._begun = run_dir, session, time.perf_counter()
        run_dir.write_session(session)

    def end(
        self, outcome: Outcome, step: int, ranks: Sequence[RankReport], validation: Validation | None = None
    ) -> None:
        ending = Ending(outcome, step, time.perf_counter() - self._begun, tuple(ranks))
        if validation is not None:
            loss = validation.loss if math.isfinite(validation.loss) else None  # JSON has no NaN
            ending = replace(ending, validation_loss=loss, entropy=validation.entropy)
        self._write(ending)

    def fail(self, error: BaseException) -> None:
        """Write down that the session failed. Raises nothing itself, so that ``error`` is the one that is reported."""
        if self._session.ending is not None:
            return  # the training was over, and what came after it failed
        try:
            records = self._run_dir.read_log()
            step = records[-1].step if records else self._session.after_step
            seconds = time.perf_counter() - self._begun
            self._write(Ending(Outcome.FAILED, step, seconds, why=f"{type(error).__name__}: {error}"))
        except Exception as other:
            print(f"the end was not written to {self._run_dir.path}: {other}", file=sys.stderr)

    def _write(self, ending: Ending) -> None:
        self._session = replace(self._session, ending=ending)
        self._run_dir.write_session(self._session)


def open_account(trainer: Trainer, setup: Setup, world: World, facts: dict[str, str]) -> Account:
    config = setup.config
    session = Session(
        started=datetime.now().astimezone().isoformat(),
        after_step=trainer.steps_done,
        resumed_from=str(setup.saved.run_dir) if setup.saved else None,
        command=setup.command,
        facts={**facts, **_versions(world)},
        config=config.to_dict(),
        peak_of="allocated by torch on the GPU" if world.device.type == "cuda" else "resident memory of the process",
        forecast=forecast(trainer.planned()),
    )
    return Account(setup.run_dir, session)


def _versions(world: World) -> dict[str, str]:
    return {
        "device": device_name(world.device),
        "zero-optim": distribution_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "commit": commit() or "none: not in a checkout",
    }


def draw_losses(run_dir: RunDir) -> str | None:
    """Draw ``loss.png``, a chart that the page of the run has too. Returns None, or one line why it was not drawn."""
    picture = run_dir.path / "loss.png"
    try:
        from ..drawing.plot import png
        from ..report.run_charts import losses
        from ..report.run_data import read_run

        png(Sheet([[losses(read_run(run_dir.path))]], note=""), picture)
    except ImportError as error:
        return f"{picture.name} was not drawn: {error}; pip install matplotlib"
    except Exception as error:
        return f"{picture.name} was not drawn: {type(error).__name__}: {error}"
    return None


def write_page(run_dir: RunDir) -> str:
    """Write ``report.html``. Returns a line for the user: its path, or why it was not written. Raises nothing."""
    try:
        from ..report.run_page import write_run_page

        return f"page of the run: {write_run_page(run_dir.path)}"
    except Exception as error:
        return f"{PAGE} was not written: {type(error).__name__}: {error}"
