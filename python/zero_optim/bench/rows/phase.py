"""A row of ``memory_walkthrough``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...drawing.figures import elements
from ...drawing.sheet import Bars, Sheet
from ..columns import MIB, Column, JsonRow, RankRow, at, mebibytes, of_ranks
from ..drawings import RowKind, bars_of


@dataclass(frozen=True)
class PhaseRow(RankRow):
    """Bytes that a rank has allocated after a phase of a training, and their peak within it."""

    phase: str
    after: int
    peak: int


AFTER, PEAK = (Column(name, at(name), mebibytes) for name in ("after", "peak"))
NOTE = "Bytes of live tensors after each phase; whiskers: the most within it."


def _table(rows: Sequence[JsonRow]) -> list[str]:
    """Write stages beside each other, a phase a line."""
    first = rows[0]
    about = f"{elements(first['numel'])} {first['dtype']} parameters, {first['ranks']} ranks"
    names = list(dict.fromkeys(row["backend"] for row in rows))
    lines = [
        f"{first['op']}: {about}; MiB of a rank after each phase, and the most in it",
        _line("phase", [cell for name in names for cell in (name, PEAK.name)]),
    ]
    of_phase: list[JsonRow] = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        of_phase = [row for name in names for row in rows if (row["phase"], row["backend"]) == (phase, name)]
        lines.append(_line(phase, [column.text(row) for row in of_phase for column in (AFTER, PEAK)]))
    last = [f"{column.value(row) / row['numel']:.2f}" for row in of_phase for column in (AFTER, PEAK)]
    return [*lines, _line("bytes a parameter", last)]


def _line(name: str, cells: Sequence[str]) -> str:
    widths = (17, 8)  # of the columns AFTER and PEAK
    return f"{name:<18}" + "".join(f"{cell:>{widths[place % 2]}}" for place, cell in enumerate(cells))


def _sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw the first step, and the third, which is like all that follow."""
    about = f"{elements(rows[0]['numel'])} parameters, {rows[0]['dtype']}, {of_ranks(rows[0])}"
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    later = [phase for phase in phases if phase.endswith(" 3")]
    first = [phase for phase in phases if phase not in later]
    titles = ((f"Memory of a rank: {about}", first), ("Two steps later", later))
    return Sheet([[_bars(title, rows, of_title) for title, of_title in titles if of_title]], NOTE)


def _bars(title: str, rows: Sequence[JsonRow], phases: Sequence[str]) -> Bars:
    shown = [row for phase in phases for row in rows if row["phase"] == phase]
    return bars_of(shown, title, "MiB", AFTER, (AFTER, PEAK), (AFTER, PEAK), at("phase"), MIB)


KIND = RowKind("memory_walkthrough", "phase", _table, _sheet)
