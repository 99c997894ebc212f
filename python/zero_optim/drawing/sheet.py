"""Declarations of what is drawn: bars, lines over steps or sizes, and sheets of them. ``plot`` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain

POINTS = 640
"""About as many as a panel is pixels wide. A line has at most twice as many before it is thinned."""


class Role(Enum):
    """The owner of a bar. Each has a colour."""

    OURS = auto()
    BASELINE = auto()
    OTHER = auto()


@dataclass(frozen=True)
class Bar:
    """A bar from 0 to ``value``. ``ends``: the least and the most that was seen; ``figures``: text beside it."""

    name: str
    value: float
    ends: tuple[float, float]
    figures: Sequence[str]
    role: Role = Role.OTHER
    group: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars below each other. Those that follow each other with the same ``group`` stand together, under it.

    Attributes:
        headings: of the figures beside the bars.
        roof: what no bar can exceed: its name, and its value.
    """

    title: str
    unit: str
    bars: Sequence[Bar]
    headings: Sequence[str]
    roof: tuple[str, float] | None = None


class Look(Enum):
    """The look of a line."""

    LINE = auto()
    DASHED = auto()
    DOTS = auto()


@dataclass(frozen=True)
class Line:
    """Points of one name. Where y is None, the line has a gap.

    Attributes:
        end: what is said of the last point.
        band: where each point was seen to be, drawn as a shade.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    end: str
    band: Sequence[tuple[float | None, float | None]] | None = None
    look: Look = Look.LINE

    @property
    def values(self) -> list[float]:
        """All that are there, with the ends of the band."""
        return [value for value in chain(self.y, *(self.band or ())) if value is not None]

    @property
    def last(self) -> float | None:
        """The last that is there."""
        return next((value for value in reversed(self.y) if value is not None), None)

    @property
    def label(self) -> str:
        return f"{self.name}: {self.end}" if self.end else self.name


class Scale(Enum):
    """The scale of a y axis. DATA: from the least to the most value. TENS, TWOS: logarithmic, of positive values."""

    FROM_ZERO = auto()
    DATA = auto()
    TENS = auto()
    TWOS = auto()


@dataclass(frozen=True)
class Marks:
    """Upright lines over the whole height, and what they stand for."""

    x: Sequence[float]
    name: str


@dataclass(frozen=True)
class Lines:
    """Figures over steps, or over sizes.

    Attributes:
        by_size: x is a number of elements, on a logarithmic axis.
        roof: what no line can exceed.
        top: where the axis ends, if values above it are to be cut off.
        stacked: each line is a part of a whole, and lies on those before it. All have the same x.
        in_turn: lines have colours by their place, where nobody knows their names before.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x_name: str = "step"
    by_size: bool = False
    scale: Scale = Scale.FROM_ZERO
    roof: Line | None = None
    top: float | None = None
    stacked: bool = False
    in_turn: bool = False
    marks: Marks = field(default=Marks((), ""))

    @property
    def all_lines(self) -> list[Line]:
        """The roof among them."""
        return [*self.lines, *([self.roof] if self.roof else [])]


Drawing = Bars | Lines


@dataclass(frozen=True)
class Sheet:
    """Drawings beside and below each other, as on paper. ``title`` and ``details`` stand above, ``note`` below."""

    grid: Sequence[Sequence[Drawing | None]]
    note: str
    title: str = ""
    details: str = ""

    @property
    def drawings(self) -> list[Drawing]:
        return [drawing for drawing in chain(*self.grid) if drawing is not None]


def points_in_one(points: int) -> int:
    """Count how many points a line of so many has in one, once it is thinned: 1 where it shows them all."""
    return 1 if points <= 2 * POINTS else math.ceil(points / POINTS)


def thinned(line: Line) -> Line:
    """The mean of many points at the middle one of them; the least and the most as a band. Gaps count for nothing."""
    size = points_in_one(len(line.x))
    if size == 1:
        return line
    x: list[float] = []
    y: list[float | None] = []
    band: list[tuple[float | None, float | None]] = []
    for start in range(0, len(line.x), size):
        xs = line.x[start : start + size]
        there = [value for value in line.y[start : start + size] if value is not None]
        x.append(xs[len(xs) // 2])
        y.append(math.fsum(there) / len(there) if there else None)
        band.append((min(there), max(there)) if there else (None, None))
    return replace(line, x=x, y=y, band=band)
