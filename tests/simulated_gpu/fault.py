"""What a seeded fault is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from order_programs import DEFAULT, SIDE, OrderProgram

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "zero_optim"


@dataclass(frozen=True)
class Edit:
    """In ``file`` of the package, the text ``old``, which is there once, becomes ``new``."""

    file: str
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """Raises ValueError where ``old`` is not in the text exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {count} times, and not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Fault:
    """One wait that is missing, or is at the wrong place.

    Attributes:
        programs: what reveals it, the likeliest first.
        simulation: which simulated GPU they run on.
        hidden_by: of a fault with several edits, why there are several waits, and one alone can be missed.
        unseen: why no program shows it on these simulations. Such a fault is not run; empty: one of ``programs`` does.
        ranks: how many run the programs.
        debug: what ``ZERO_OPTIM_DEBUG`` is.
    """

    name: str
    edits: tuple[Edit, ...]
    programs: tuple[OrderProgram, ...]
    simulation: str = "streams:never"
    hidden_by: str = ""
    unseen: str = ""
    ranks: int = 2
    debug: str = ""


def two(stage: int, what: str = "plain") -> OrderProgram:
    """Made on the default stream, trained on another."""
    return OrderProgram(stage, what, DEFAULT, SIDE)


def one(stage: int, what: str = "plain") -> OrderProgram:
    return OrderProgram(stage, what)


def fault(
    name: str, file: str, old: str, new: str, *programs: OrderProgram, and_: tuple[Edit, ...] = (), **more: Any
) -> Fault:
    """``and_``: further edits. ``more``: of ``Fault``."""
    return Fault(name, (Edit(file, old, new), *and_), programs, **more)
