"""The contents of ``run.json``: for each start of ``zero-optim train`` what was run, what was planned, how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

SCHEMA = 1


class Outcome(str, Enum):
    """The end of a session. A session without an ending is still running, or was killed."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class RankReport:
    """The report of one rank at the end of a session.

    Attributes:
        memory: the most bytes of each kind, not all at one time.
        collectives: calls, bytes and seconds blocked, by kind.
        seconds: by phase, of all steps of the session.
        steps: of the session.
        peak_bytes: peak of the memory that ``Session.peak_of`` names.
        skipped_steps: steps of the session without an update, as gradients were not finite.
    """

    memory: dict[str, float]
    collectives: dict[str, dict[str, float]]
    seconds: dict[str, float]
    steps: int
    peak_bytes: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Forecast:
    """A forecast by formula: bytes of a rank by kind, and what it communicates in a step, bytes by
    collective."""

    memory: dict[str, float]
    traffic: dict[str, float]


@dataclass(frozen=True)
class Ending:
    """The end of a session. Losses are in nats per byte of held-out text. ``why``: the error of a failed session."""

    outcome: Outcome
    step: int
    seconds: float
    ranks: tuple[RankReport, ...] = ()
    validation_loss: float | None = None
    entropy: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class Session:
    """One start of ``zero-optim train``.

    Attributes:
        started: date and time, with the offset from UTC.
        after_step: the step after which the session began; 0: a fresh run.
        resumed_from: the folder of the run that it resumes; None: a fresh run.
        facts: model, data, ranks and versions, by name, in the order to be shown.
        config: the flags.
        peak_of: the memory that ``RankReport.peak_bytes`` counts, in words.
        taken_back_to: the step from which a later session went on, and trained the following steps anew.
    """

    started: str
    after_step: int
    resumed_from: str | None
    command: str
    facts: dict[str, str]
    config: dict[str, Any]
    peak_of: str
    forecast: Forecast
    ending: Ending | None = None
    taken_back_to: int | None = None

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Session:
        """Read what ``asdict`` made of a session. Raises TypeError, KeyError or ValueError for anything else."""
        ending = said["ending"]
        if ending is not None:
            ranks = tuple(RankReport(**rank) for rank in ending["ranks"])
            ending = Ending(**{**ending, "ranks": ranks, "outcome": Outcome(ending["outcome"])})
        return cls(**{**said, "forecast": Forecast(**said["forecast"]), "ending": ending})


def sessions_to_text(sessions: Sequence[Session]) -> str:
    """The content of ``run.json``."""
    return json.dumps({"schema": SCHEMA, "sessions": [asdict(session) for session in sessions]}, indent=1) + "\n"


def sessions_from_text(text: str) -> list[Session]:
    """Read what ``sessions_to_text`` made. Raises ValueError for anything else."""
    try:
        said = json.loads(text)
        if said["schema"] != SCHEMA:
            raise ValueError(f"has schema {said['schema']}; this version reads {SCHEMA}")
        return [Session.from_json(session) for session in said["sessions"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not as zero-optim train writes it ({type(error).__name__}: {error})") from error


def taken_back(sessions: Sequence[Session], step: int) -> list[Session]:
    """Drop the sessions that began at ``step`` or later; mark the kept ones that went further as taken back to it."""
    kept = []
    for session in sessions:
        # A session that was killed has no ending: it, too, may have gone further than ``step``.
        if session.ending is None or session.ending.step > step:
            session = replace(session, taken_back_to=min(step, session.taken_back_to or step))
        if session.after_step < step:
            kept.append(session)
    return kept
