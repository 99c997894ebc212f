"""Drawings as parts of a page. Each is an SVG within an image, so that ids and styles of charts cannot clash."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..drawing.figures import short
from ..drawing.sheet import Bars, Drawing, Line, Lines
from .html import Html, tag

MISSING = "The charts were left out, as matplotlib is not installed: pip install zero-kernels[train]"


@dataclass(frozen=True)
class Chart:
    """A drawing on a page. ``key``: its id, unique on the page; ``note``: a text below it."""

    key: str
    drawing: Drawing
    note: str = ""


def missing() -> Html | None:
    """A sentence for a page without charts; None where they can be drawn."""
    try:
        from ..drawing import plot  # noqa: F401
    except ImportError:
        return tag("p", MISSING, class_="note")
    return None


def cards(charts: Sequence[Chart]) -> Html:
    """Lay charts out beside each other; empty where matplotlib is missing."""
    if missing():
        return Html()
    from ..drawing.plot import svg

    return tag("div", *(_card(chart, svg(chart.drawing)) for chart in charts), class_="charts")


def _card(chart: Chart, svg: str) -> Html:
    source = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    image = tag("div", tag("img", src=source, alt=spoken(chart.drawing)), class_="scroll", tabindex=0)
    return tag("figure", image, tag("p", chart.note, class_="note") if chart.note else None, id=chart.key)


def spoken(drawing: Drawing) -> str:
    """Describe a drawing for screen readers, with the end of each line and the value of each bar."""
    said = _bars_spoken(drawing) if isinstance(drawing, Bars) else (line.label for line in drawing.all_lines)
    return f"{drawing.title}, {drawing.unit}. {'; '.join(said)}."


def _bars_spoken(bars: Bars) -> Iterator[str]:
    for group, of_group in groupby(bars.bars, key=lambda bar: bar.group):
        each = ", ".join(f"{bar.name} {short(bar.value)}" for bar in of_group)
        yield f"{group}: {each}" if group else each


def data(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """The points of all lines, as they are drawn, for other programs."""
    return [_points(chart.key, chart.drawing) for chart in charts if isinstance(chart.drawing, Lines)]


def _points(key: str, lines: Lines) -> dict[str, Any]:
    about = {"key": key, "title": lines.title, "unit": lines.unit, "x_name": lines.x_name}
    return {**about, "lines": [_line(line) for line in lines.all_lines]}


def _line(line: Line) -> dict[str, Any]:
    said = {"name": line.name, "x": line.x, "y": line.y}
    return {**said, "band": line.band} if line.band else said
