"""Lines over steps: an SVG that fills its box, with words and ticks around it in HTML, so that these never shrink.

The drawing is complete without a script. The data below it let ``script.js`` show values at the pointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import axis as axes
from .axis import Axis
from .figures import count, short
from .html import Html, join, tag
from .thinning import BUCKETS, MEANS, Point, bucket_size, extremes, means

WIDTH, HEIGHT = 1000, 400  # of the drawing's own units, stretched over the box


@dataclass(frozen=True)
class Line:
    """A line, or dots where ``dots``. ``color`` is one of style.css's: ``one`` to ``six``, ``faint``."""

    name: str
    points: Sequence[Point]
    color: str
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class LineChart:
    """A chart and all that it says.

    Attributes:
        key: unique on the page.
        unit: of the values, as the axis shows it.
        x: None: as far as the points go.
        y: None: linear, as far as the values go.
        marks: x of upright lines, and what they are, such as skipped steps.
        stacked: lines are parts, one on the other.
        note: below the chart.
        wide: it takes a whole row of the page.
    """

    key: str
    title: str
    unit: str
    lines: Sequence[Line]
    x: Axis | None = None
    y: Axis | None = None
    marks: tuple[Sequence[float], str] = ((), "")
    stacked: bool = False
    note: str = ""
    x_name: str = "step"
    wide: bool = False


@dataclass(frozen=True)
class Drawn:
    """A chart's HTML, and what the script needs of it."""

    html: Html
    data: dict[str, Any]


def draw(chart: LineChart) -> Drawn:
    """Thins the lines, and draws them."""
    thinned = [(line, (means if chart.stacked else extremes)(line.points)) for line in chart.lines]
    x = chart.x or axes.of_steps(*_span(chart))
    tops = _stack([points for _, points in thinned]) if chart.stacked else [points for _, points in thinned]
    y = chart.y or axes.linear([v for points in tops for _, v in points if v is not None], from_zero=chart.stacked)
    shapes = _areas(thinned, tops, x, y) if chart.stacked else [_shape(line, points, x, y) for line, points in thinned]
    marks = _marks(chart.marks[0], x)
    svg = tag(
        "svg", _grid(y), *shapes, marks, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", aria_hidden="true"
    )
    html = tag(
        "figure",
        tag("figcaption", tag("h3", chart.title), tag("span", chart.unit, class_="unit")),
        _legend(chart),
        tag("div", svg, *_labels(chart, x, y), class_="plot", **_spoken(chart)),
        tag("p", note, class_="note") if (note := _note(chart, y)) else None,
        class_="chart wide" if chart.wide else "chart",
        id=chart.key,
    )
    lines = [_data(line, points, top) for (line, points), top in zip(thinned, tops, strict=True)]
    ends = {"x": [x.low, x.high, x.base], "y": [y.low, y.high, y.base]}
    return Drawn(html, {"key": chart.key, "x_name": chart.x_name, **ends, "lines": lines})


def _span(chart: LineChart) -> tuple[float, float]:
    found = [x for line in chart.lines for x, _ in line.points]
    return (min(found), max(found)) if found else (0.0, 1.0)


def _data(line: Line, points: Sequence[Point], tops: Sequence[Point]) -> dict[str, Any]:
    said = {"name": line.name, "x": [x for x, _ in points], "y": [value for _, value in points]}
    return said if tops is points else {**said, "top": [value for _, value in tops]}


def _spoken(chart: LineChart) -> dict[str, str | int]:
    """For those who hear the page: what is drawn, and each line's last value."""
    ends = "; ".join(f"{line.name}, last {last}" for line in chart.lines if (last := _last(line)))
    hint = "Arrow keys move along it."
    return {"role": "img", "tabindex": 0, "aria_label": f"{chart.title}, {chart.unit}. {ends}. {hint}"}


def _last(line: Line) -> str:
    """The last value, as text; nothing where there is none."""
    there = [value for _, value in line.points if value is not None]
    return short(there[-1], 5) if there else ""


def _legend(chart: LineChart) -> Html:
    items = [
        tag(
            "li",
            tag("i", class_=f"key {line.color}{' dashed' * line.dashed}{' dot' * line.dots}"),
            line.name,
            tag("output", _last(line), aria_live="off"),
        )
        for line in chart.lines
    ]
    if chart.marks[0]:
        items.append(tag("li", tag("i", class_="key mark"), chart.marks[1]))
    return tag("ul", *items, tag("li", tag("output", aria_live="off"), class_="where"), class_="legend")


def _note(chart: LineChart, y: Axis) -> str:
    most = max((len(line.points) for line in chart.lines), default=0)
    size = bucket_size(most, MEANS if chart.stacked else BUCKETS)
    notes = [chart.note] if chart.note else []
    if size > 1 and chart.stacked:
        notes.append(f"Each point is the mean of {count(size, 'step')}.")
    elif size > 1:
        notes.append(f"Of each {count(size, 'step')} the least and the most are drawn, faint, and the mean.")
    if y.beyond:
        notes.append(f"{count(y.beyond, 'value')} above the axis: drawn at its top.")
    if y.base:
        notes.append("Logarithmic axis.")
    return " ".join(notes)


def _labels(chart: LineChart, x: Axis, y: Axis) -> Iterable[Html]:
    for tick in y.ticks():
        yield tag("span", y.label(tick), class_="y", style=f"bottom:{100 * y.place(tick):.2f}%")
    whole = [tick for tick in x.ticks() if chart.x_name != "step" or tick == round(tick)]
    for tick in whole:
        place = x.place(tick)
        edge = " last" if place > 0.94 else ""
        yield tag("span", x.label(tick), class_=f"x{edge}", style=f"left:{100 * place:.2f}%")
    yield tag("span", chart.x_name, class_="x-name")


def _grid(y: Axis) -> Html:
    heights = [f"{_down(y, tick):.1f}" for tick in y.ticks()]
    return tag("path", class_="grid", d="".join(f"M0 {height}H{WIDTH}" for height in heights))


def _marks(steps: Sequence[float], x: Axis) -> Html | None:
    """At most one a pixel."""
    places = dict.fromkeys(round(WIDTH * x.place(step)) for step in steps)
    return tag("path", class_="mark", d="".join(f"M{place} 0V{HEIGHT}" for place in places)) if places else None


def _shape(line: Line, points: Sequence[Point], x: Axis, y: Axis) -> Html:
    """Of a line that was thinned its extremes, faint, and the mean over them."""
    if line.dots or sum(value is not None for _, value in points) == 1:
        return tag("path", class_=f"dots {line.color}", d=_dots(points, x, y))
    dashed = " dashed" if line.dashed else ""
    drawn = tag("path", class_=f"line {line.color}{dashed}", d=_path(means(line.points, BUCKETS), x, y))
    if len(points) == len(line.points):
        return drawn
    return join([tag("path", class_=f"line faint {line.color}", d=_path(points, x, y)), drawn])


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """A gap where a value is missing."""
    parts, pen = [], "M"
    for here, value in points:
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{_across(x, here):.1f} {_down(y, value):.1f}")
        pen = "L"
    return "".join(parts)


def _dots(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """Lines of no length, whose round ends are the dots: circles would be stretched with the drawing."""
    return "".join(f"M{_across(x, here):.1f} {_down(y, value):.1f}h0" for here, value in points if value is not None)


def _stack(parts: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """Each part's top: itself and all before it."""
    tops: list[list[Point]] = []
    for part in parts:
        below = tops[-1] if tops else [(x, 0.0) for x, _ in part]
        tops.append([(x, (value or 0.0) + (under or 0.0)) for (x, value), (_, under) in zip(part, below, strict=True)])
    return tops


def _areas(
    thinned: Sequence[tuple[Line, Sequence[Point]]], tops: Sequence[Sequence[Point]], x: Axis, y: Axis
) -> list[Html]:
    floors = [[(here, 0.0) for here, _ in tops[0]], *tops] if tops else []
    shapes = []
    for (line, _), floor, top in zip(thinned, floors, tops, strict=False):
        if len(top) == 1:  # a bar in place of an area without width
            floor, top = ([(at, points[0][1]) for at in (x.low + 0.75, x.high - 0.75)] for points in (floor, top))
        back = _path(list(reversed(floor)), x, y).replace("M", "L")
        shapes.append(tag("path", class_=f"area {line.color}", d=_path(top, x, y) + back + "Z"))
    return shapes


def _across(x: Axis, value: float) -> float:
    return WIDTH * x.place(value)


def _down(y: Axis, value: float) -> float:
    return HEIGHT * (1 - y.place(value))


def join_drawn(charts: Iterable[Drawn]) -> tuple[Html, list[dict[str, Any]]]:
    """The charts' HTML, and their data in the same order."""
    drawn = list(charts)
    return join(chart.html for chart in drawn), [chart.data for chart in drawn]
