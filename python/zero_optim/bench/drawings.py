"""What is drawn of rows, whoever draws it: bars and lines, and all of one kind of row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from .columns import Column, JsonRow

OURS = ("ours", "ours background", "stage0", "stage1", "stage2", "stage3", "stage3_keep", "cuda", "cpu", "triton",
        "paged 0", "paged half", "cpu no speculation", "nvme", "pages write", "pages read", "pages both")  # fmt: skip
BASELINES = ("None", "fused", "ddp", "disk", "torch_pipeline")


@dataclass(frozen=True)
class Bars:
    """A bar for each row.

    Attributes:
        unit: of the bars; ``size`` is how much of what ``length`` counts makes one.
        whiskers: the columns of their two ends.
        columns: figures beside the bars.
        group: rows with the same one stand together, under it.
        roof: what no bar can exceed: its name, and its value.
    """

    title: str
    unit: str
    rows: Sequence[JsonRow]
    length: Column
    whiskers: tuple[Column, Column]
    columns: Sequence[Column]
    group: Callable[[JsonRow], str] = lambda row: ""
    size: float = 1
    roof: tuple[str, float] | None = None

    def value(self, row: JsonRow) -> float:
        return float(self.length.value(row)) / self.size

    def ends(self, row: JsonRow) -> tuple[float, float]:
        low, high = (float(column.value(row)) / self.size for column in self.whiskers)
        return low, high


@dataclass(frozen=True)
class Line:
    """Points of one name; ``band``: where each was seen to be; ``end``: what is said behind the last."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    end: str
    band: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True)
class Lines:
    """Figures over sizes (``by_size``: a logarithmic axis), or over steps. ``roof``: what no line can exceed."""

    title: str
    unit: str
    lines: Sequence[Line]
    x_name: str
    by_size: bool = False
    from_zero: bool = True
    roof: Line | None = None


Drawing = Bars | Lines


@dataclass(frozen=True)
class Sheet:
    """What is drawn of the rows of a kind, as on paper: drawings beside and below each other. ``note``: what it is."""

    grid: Sequence[Sequence[Drawing | None]]
    note: str

    @property
    def drawings(self) -> list[Drawing]:
        return [drawing for drawing in chain(*self.grid) if drawing is not None]


def role_of(row: JsonRow) -> str:
    """Whose bar this is: with ``ours``, ``baseline`` and ``other`` each has a colour."""
    name = row["backend"].split(",")[0]
    if name in OURS:
        return "ours"
    return "baseline" if name in BASELINES or row["backend"] == row.get("baseline") else "other"


@dataclass(frozen=True)
class Kind:
    """Rows of one shape. ``key``: which only they have; ``table``: the lines of a block; ``sheet``: of all rows."""

    name: str
    key: str
    table: Callable[[Sequence[JsonRow]], list[str]]
    sheet: Callable[[Sequence[JsonRow]], Sheet]
