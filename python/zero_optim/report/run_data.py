"""A run, read from its folder, and the problems found in it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..drawing.figures import count, megabytes, percent
from ..errors import UsageError
from ..train.report import state_kinds
from ..train.run_dir import LOG, RUN, RunDir, StepRecord
from ..train.session import Outcome, RankReport, Session

TOLERANCE = 0.01
"""Share of the plan by which memory may exceed it before that is reported as a problem."""


@dataclass(frozen=True)
class Run:
    """The steps in a run's log, and its starts. ``sessions`` is empty for a run of an earlier version."""

    path: Path
    steps: tuple[StepRecord, ...]
    sessions: tuple[Session, ...]

    @cached_property
    def skipped(self) -> list[int]:
        """Steps whose gradients were not finite: the optimizer made no update."""
        return [step.step for step in self.steps if step.grad_norm is None]

    @cached_property
    def lost(self) -> list[int]:
        """Steps whose loss was not finite."""
        return [step.step for step in self.steps if step.loss is None]

    @property
    def median_speed(self) -> float | None:
        """Tokens a second, over all steps that the log holds."""
        return statistics.median(step.tokens_per_s for step in self.steps) if self.steps else None

    @property
    def last_session(self) -> Session | None:
        return self.sessions[-1] if self.sessions else None

    @cached_property
    def measured(self) -> Session | None:
        """The latest session whose ranks have reported."""
        return next((session for session in reversed(self.sessions) if ranks_of(session)), None)

    @cached_property
    def validations(self) -> list[tuple[int, float, float]]:
        """Step, held-out loss and the text's entropy at the end of each session that was not taken back."""
        endings = [session.ending for session in self.sessions if session.ending and session.taken_back_to is None]
        found = [(end.step, end.validation_loss, end.entropy) for end in endings]
        return [(step, loss, entropy) for step, loss, entropy in found if loss is not None and entropy is not None]

    @property
    def seconds(self) -> float | None:
        """Duration of all sessions whose end is known."""
        known = [session.ending.seconds for session in self.sessions if session.ending]
        return sum(known) if known else None


def ranks_of(session: Session) -> tuple[RankReport, ...]:
    return session.ending.ranks if session.ending else ()


def read_run(path: Path) -> Run:
    """Read a run's folder. Raises UsageError for any other folder, naming what is missing or damaged."""
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder" if not path.exists() else f"{path}: is no folder of a run")
    if not (path / LOG).is_file():
        raise UsageError(f"{path}: holds no {LOG}, which every run of zero-optim train writes")
    run_dir = RunDir(path)
    return Run(path, tuple(run_dir.read_log()), tuple(run_dir.sessions()))


def state_bytes(memory: dict[str, float]) -> float:
    """Sum the model state: parameters, gradients, and the optimizer's state."""
    return sum(memory[kind] for kind in state_kinds(memory))


def fullest(session: Session) -> int:
    """The rank with most model state."""
    ranks = ranks_of(session)
    return max(range(len(ranks)), key=lambda rank: state_bytes(ranks[rank].memory))


def problems(run: Run) -> list[str]:
    """Describe each problem of the run in a sentence; empty where all was well."""
    return [*_in_steps(run), *_in_ending(run), *_in_memory(run)]


def _in_steps(run: Run) -> Iterator[str]:
    if not run.steps:
        yield "The log holds no step yet."
    if run.lost:
        yield f"The loss of {count(len(run.lost), 'step')} was not finite, first at step {run.lost[0]:,}."
    if run.skipped:
        verb = "was" if len(run.skipped) == 1 else "were"
        yield (
            f"{count(len(run.skipped), 'step')} of {len(run.steps):,} {verb} skipped, as gradients were not finite: "
            f"first step {run.skipped[0]:,}, last step {run.skipped[-1]:,}."
            + (" In fp16 some are, while the loss scale is found." if run.steps[0].loss_scale != 1 else "")
        )


def _in_ending(run: Run) -> Iterator[str]:
    session = run.last_session
    if session is None:
        yield f"There is no {RUN}: an earlier version wrote this run. What was run, memory and traffic are not known."
    elif session.ending is None:
        yield "No end is on record: the run is under way, or it was killed."
    elif session.ending.outcome is Outcome.INTERRUPTED:
        yield f"It was interrupted after step {session.ending.step:,} of {session.config['steps']:,}."
    elif session.ending.outcome is Outcome.FAILED:
        yield f"It failed after step {session.ending.step:,}: {session.ending.why}"
    elif session.ending.validation_loss is None:
        yield "The held-out loss was not finite."


def _in_memory(run: Run) -> Iterator[str]:
    session = run.measured
    if session is None:
        return
    rank = fullest(session)
    here, planned = state_bytes(ranks_of(session)[rank].memory), state_bytes(session.forecast.memory)
    if planned and here > (1 + TOLERANCE) * planned:
        over = percent(here / planned - 1)
        yield (
            f"Model state of rank {rank} is {megabytes(here)} MB where {megabytes(planned)} MB were planned: {over}, "
            f"more than {100 * TOLERANCE:g}\N{NO-BREAK SPACE}% above."
        )
