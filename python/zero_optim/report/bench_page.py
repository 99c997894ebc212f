"""The page of benchmark results: bars and lines drawn from the JSON files, and their tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.panels import Panel, Sheet, kind_of, sheet_of
from ..bench.record import read
from ..bench.samples import NOTE, Course, courses
from ..bench.table import table as text_table
from ..train.config import UsageError
from ..train.run_dir import PAGE
from .axis import linear, logarithmic
from .bar_table import Bar, Group, bar_table
from .html import Html, details, join, tag
from .line_chart import Drawn, Line, LineChart, draw, join_drawn
from .page import footer, page
from .run_tables import facts

JsonRow = Mapping[str, Any]

_COLORS = {"ours": "one", "baseline": "two", "other": "six"}
_OF_LINES = ("one", "three", "two", "four", "five", "six")
_FACTS = (
    "date",
    "version",
    "commit",
    "device",
    "driver",
    "torch",
    "cuda",
    "triton",
    "python",
    "threads",
    "isa",
    "load",
)


def results_in(folder: Path) -> list[Path]:
    """JSON files of the bench in a folder and those below it, the newest first by name."""
    files = [path for path in folder.rglob("*.json") if path.is_file()]
    return sorted(filter(_is_result, files), key=lambda path: path.name, reverse=True)


def _is_result(path: Path) -> bool:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and {"schema", "rows", "baselines"} <= said.keys()


def write_bench_page(source: Path, out: Path | None = None) -> Path:
    """Of one result, or of all in a folder; beside the result, or as ``report.html`` in the folder, if not ``out``.

    Returns the page's path. Raises UsageError and OSError.
    """
    if source.is_dir():
        paths, path = results_in(source), out or source / PAGE
    else:
        paths, path = [source], out or source.with_suffix(".html")
    if path.resolve() in (read_path.resolve() for read_path in paths):
        raise UsageError(f"--out {path}: is what the page is made of; give another file")
    path.write_text(bench_page(source.resolve().name, paths), encoding="utf-8")
    return path


def bench_page(name: str, paths: Sequence[Path]) -> str:
    """The HTML. Its data (``<script id="data">``): the records as they are read, and the points of charts."""
    records = [read(path) for path in paths]
    sections, charts = [], []
    for number, (path, record) in enumerate(zip(paths, records, strict=True)):
        html, data = _section(number, path, record)
        sections.append(html)
        charts += data
    title = f"Benchmarks: {name}"
    contents = _contents(records) if len(records) > 1 else None
    header = tag("header", tag("h1", title), _colors())
    body = [header, contents, *sections, footer("The page is one file, and fetches nothing.")]
    named = [{"file": str(path), **record} for path, record in zip(paths, records, strict=True)]
    return page(title, join(body), {"results": named, "charts": charts})


def _colors() -> Html:
    names = {"ours": "ours", "baseline": "what others are compared with", "other": "all others"}
    keys = (tag("li", tag("i", class_=f"key block {_COLORS[kind]}"), name) for kind, name in names.items())
    return tag("ul", *keys, class_="legend")


def _contents(records: Sequence[dict[str, Any]]) -> Html:
    names = [f"{_ops(record)}, {record['date']}" for record in records]
    links = (tag("li", tag("a", name, href=f"#result-{number}")) for number, name in enumerate(names))
    return tag("nav", tag("ul", *links), aria_label="Results")


def _ops(record: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(str(row["op"]) for row in record["rows"])) or "no rows"


def _section(number: int, path: Path, record: dict[str, Any]) -> tuple[Html, list[dict[str, Any]]]:
    about = [(name, str(record[name])) for name in _FACTS if record.get(name) is not None]
    about += [(name, str(state)) for name, state in record["baselines"].items()]
    plots, data = _plots(number, record) if record["rows"] else (None, [])
    figures = details("All figures", tag("div", tag("pre", text_table(record)), class_="scroll", tabindex=0))
    heading = tag("h2", f"{_ops(record)}, {record['date']}")
    parts = [heading, details(f"{record['device']}, torch {record['torch']}", facts([("file", str(path)), *about]))]
    return tag("section", *parts, plots, figures, id=f"result-{number}"), data


def _plots(number: int, record: dict[str, Any]) -> tuple[Html, list[dict[str, Any]]]:
    sheet = sheet_of(record)
    if sheet is None:
        of_ranks = [course for row in courses(record) for course in row]
        charts, note = [_course(f"chart-{number}-{n}", course) for n, course in enumerate(of_ranks)], NOTE
    else:
        charts, note = list(_over_sizes(number, record, sheet)), sheet.note
    drawn, data = join_drawn(charts)
    bars = [] if sheet is None else [_bars(panel) for panel in sheet.panels if not (panel.roof and charts)]
    grid = tag("div", drawn, class_="charts") if charts else None
    return join([*bars, grid, tag("p", note, class_="note")]), data


def _bars(panel: Panel) -> Html:
    groups: dict[str, list[Bar]] = {}
    for row in panel.rows:
        cells = [text(row) for text in panel.columns.values()]
        bar = Bar(row["backend"], panel.value(row), _COLORS[kind_of(row)], cells, whiskers=panel.whiskers(row))
        groups.setdefault(panel.group(row), []).append(bar)
    roof = f"; dashed: {panel.roof[0]}, {panel.roof[1]:,.1f}" if panel.roof else ""
    headings = ("", f"{panel.unit}{roof}", *panel.columns)
    return bar_table(panel.title, headings, [Group(name, bars) for name, bars in groups.items()], panel.roof)


def _course(key: str, course: Course) -> Drawn:
    traces = zip(course.names, course.steps, course.figures, _OF_LINES, strict=False)
    lines = [Line(name, list(zip(steps, figures, strict=True)), color) for name, steps, figures, color in traces]
    values = [figure for figures in course.figures for figure in figures]
    y = linear(values, from_zero=course.from_zero)
    return draw(LineChart(key, course.title, course.unit, lines, y=y))


def _over_sizes(number: int, record: dict[str, Any], sheet: Sheet) -> Iterator[Drawn]:
    """Speed over the number of elements, where several were measured, the roof as a dashed line."""
    rows = [row for panel in sheet.panels if panel.roof for row in panel.rows]
    if len({row["numel"] for row in rows}) < 2:
        return
    for n, (op, dtype) in enumerate(dict.fromkeys((row["op"], row["dtype"]) for row in rows)):
        of_chart = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
        yield draw(_speed_chart(f"chart-{number}-{n}", f"{op}, {dtype}", of_chart))


def _speed_chart(key: str, title: str, rows: Sequence[JsonRow]) -> LineChart:
    backends = dict.fromkeys(row["backend"] for row in rows)
    lines = [
        Line(name, sorted((row["numel"], row["gbps"]) for row in rows if row["backend"] == name), color)
        for name, color in zip(backends, (*_OF_LINES, *_OF_LINES), strict=False)
    ]
    roof = sorted({(row["numel"], row["copy_gbps"]) for row in rows})
    lines.append(Line(rows[0]["yardstick"], roof, "six", dashed=True))
    x = logarithmic([row["numel"] for row in rows], base=2)
    y = linear([value for line in lines for _, value in line.points if value is not None], from_zero=True)
    return LineChart(key, title, "GB/s", lines, x, y, x_name="elements")
