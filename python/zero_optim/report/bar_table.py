"""A table in which one column is a bar: the drawing and its figures, read in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .html import Html, Part, tag

_LENGTH, _THICK, _THIN = 1000.0, 12, 4


@dataclass(frozen=True)
class Bar:
    """A row.

    Attributes:
        value: the bar's length, None for no bar; ``of_plan``: of the thinner one below it.
        whiskers: from where to where it was seen to be.
        color: one of style.css's.
        cells: the figures, as text.
        sum: this row adds up those above it, and has no bar.
    """

    name: str
    value: float | None
    color: str
    cells: Sequence[str]
    of_plan: float | None = None
    whiskers: tuple[float, float] | None = None
    sum: bool = False


@dataclass(frozen=True)
class Group:
    """Bars under a heading of their own; an empty one is not shown."""

    name: str
    bars: Sequence[Bar]


def bar_table(
    caption: str, headings: Sequence[Part], groups: Sequence[Group], roof: tuple[str, float] | None = None
) -> Html:
    """``headings``: of the names, of the bars, and of each figure. ``roof``: what no bar exceeds, drawn as a line."""
    ends = [end for group in groups for bar in group.bars for end in _ends(bar)]
    full = 1.02 * max([*ends, roof[1] if roof else 0.0]) or 1.0
    head = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    bodies = [_body(group, full, roof, len(headings)) for group in groups]
    whole = tag("table", tag("caption", caption), tag("thead", head), *bodies, class_="bars")
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _body(group: Group, full: float, roof: tuple[str, float] | None, columns: int) -> Html:
    name = tag("tr", tag("th", group.name, colspan=columns, scope="rowgroup"), class_="group") if group.name else None
    return tag("tbody", name, *(_row(bar, full, roof) for bar in group.bars))


def _row(bar: Bar, full: float, roof: tuple[str, float] | None) -> Html:
    cells = (tag("td", cell) for cell in bar.cells)
    drawn = None if bar.sum or bar.value is None else _drawn(bar, bar.value, full, roof)
    name = tag("th", bar.name, scope="row")
    return tag("tr", name, tag("td", drawn, class_="bar"), *cells, class_="sum" if bar.sum else None)


def _ends(bar: Bar) -> list[float]:
    return [] if bar.sum else [bar.value or 0.0, bar.of_plan or 0.0, *(bar.whiskers or ())]


def _drawn(bar: Bar, value: float, full: float, roof: tuple[str, float] | None) -> Html:
    def across(end: float) -> str:
        return f"{_LENGTH * max(0.0, end) / full:.1f}"

    parts = [tag("rect", class_=f"fill {bar.color}", x=0, y=0, width=across(value), height=_THICK)]
    if bar.of_plan is not None:
        parts.append(tag("rect", class_="fill plan", x=0, y=_THICK + 2, width=across(bar.of_plan), height=_THIN))
    if bar.whiskers is not None and bar.whiskers[0] < bar.whiskers[1]:
        low, high = map(across, bar.whiskers)
        ends = "".join(f"M{end} 2V{_THICK - 2}" for end in (low, high))
        parts.append(tag("path", class_="whisker", d=f"M{low} {_THICK / 2}H{high}{ends}"))
    if roof is not None:
        parts.append(tag("path", class_="roof", d=f"M{across(roof[1])} -3V{_THICK + 3}"))
    height = _THICK + (2 + _THIN if bar.of_plan is not None else 0)
    box = f"0 0 {_LENGTH:g} {height}"
    return tag("svg", *parts, viewBox=box, height=height, preserveAspectRatio="none", aria_hidden="true")
