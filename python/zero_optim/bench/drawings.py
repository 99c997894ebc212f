"""Drawings of rows: their bars, and the sheet of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..drawing.sheet import Bar, Bars, Role, Sheet
from .columns import Column, JsonRow

OURS = ("ours", "stage", "muon", "cuda", "cpu", "triton", "paged", "nvme", "pages")
"""Prefixes of our contenders' names."""
BASELINES = ("None", "fused", "ddp", "ddp_muon", "disk", "torch_pipeline")


def bars_of(
    rows: Sequence[JsonRow],
    title: str,
    unit: str,
    length: Column,
    whiskers: tuple[Column, Column],
    columns: Sequence[Column],
    group: Callable[[JsonRow], str] = lambda row: "",
    size: float = 1,
    roof: tuple[str, float] | None = None,
) -> Bars:
    """A bar for each row.

    Args:
        unit: of the bars; ``size`` is one unit in what ``length`` counts.
        whiskers: the columns of their low and high end.
        columns: figures beside the bars.
        group: the name above neighbouring rows that have the same.
    """

    def bar(row: JsonRow) -> Bar:
        value, low, high = (float(column.value(row)) / size for column in (length, *whiskers))
        figures = [column.beside_bar(row) for column in columns]
        return Bar(row["backend"], value, (low, high), figures, role_of(row), group(row))

    return Bars(title, unit, [bar(row) for row in rows], [column.name for column in columns], roof)


def role_of(row: JsonRow) -> Role:
    name = row["backend"].split(",")[0]
    if name.startswith(OURS):
        return Role.OURS
    return Role.BASELINE if name in BASELINES or row["backend"] == row.get("baseline") else Role.OTHER


@dataclass(frozen=True)
class RowKind:
    """A kind of rows. ``key``: present in such rows; ``table``: lines for a block of them; ``sheet``: drawn of all."""

    name: str
    key: str
    table: Callable[[Sequence[JsonRow]], list[str]]
    sheet: Callable[[Sequence[JsonRow]], Sheet]
