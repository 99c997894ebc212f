"""Declarations of what is drawn: bars, lines over steps or sizes, and sheets of them. ``plot`` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain

POINTS = 640
"""About as many points as a panel is pixels wide. A line of more than twice as many is thinned."""


class Role(Enum):
    """The owner of a bar. Each has a colour."""

    OURS = auto()
    BASELINE = auto()
    OTHER = auto()


@dataclass(frozen=True)
class Bar:
    """A bar from 0 to ``value``. ``ends``: of its whisker, low and high; ``figures``: text beside it."""

    name: str
    value: float
    ends: tuple[float, float]
    figures: Sequence[str]
    role: Role = Role.OTHER
    group: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars below each other. Neighbours with the same ``group`` stand together under its name.

    Attributes:
        headings: of the figures beside the bars.
        roof: a limit that no bar can exceed: its name, and its value.
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
        end: text of the last point, in the legend.
        band: low and high end at each point, drawn as a shade.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    end: str
    band: Sequence[tuple[float | None, float | None]] | None = None
    look: Look = Look.LINE

    @property
    def values(self) -> list[float]:
        """All values of the line that are not None, and of its band."""
        return [value for value in chain(self.y, *(self.band or ())) if value is not None]

    @property
    def last(self) -> float | None:
        """The last value that is not None."""
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
        roof: a line that no other can exceed.
        top: end of the axis, where values above it are cut off; None: all are shown.
        stacked: each line is a part of a whole, and is drawn on top of those before it. All have the same x.
        in_turn: colours go by a line's place, for names that are not known in advance.
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
        """The lines, and the roof where there is one."""
        return [*self.lines, *([self.roof] if self.roof else [])]


Drawing = Bars | Lines


@dataclass(frozen=True)
class Sheet:
    """Drawings in rows and columns. ``title`` and ``details`` stand above them, ``note`` below."""

    grid: Sequence[Sequence[Drawing | None]]
    note: str
    title: str = ""
    details: str = ""

    @property
    def drawings(self) -> list[Drawing]:
        return [drawing for drawing in chain(*self.grid) if drawing is not None]


def points_in_one(points: int) -> int:
    """Count how many points are averaged into one when a line of ``points`` is thinned; 1: it shows them all."""
    return 1 if points <= 2 * POINTS else math.ceil(points / POINTS)


def thinned(line: Line) -> Line:
    """Thin a line: the mean of several points at the middle one, their least and most as a band. Gaps do not count."""
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
