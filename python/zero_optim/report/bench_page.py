"""The page of benchmark results: bars and lines drawn from the JSON files, and their tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.drawings import Bars, Lines, Sheet, role_of
from ..bench.record import read
from ..bench.rows import sheets_of
from ..bench.table import table as text_table
from ..train.config import UsageError
from ..train.run_dir import PAGE
from .axis import linear, logarithmic
from .bar_table import Bar, Group, bar_table
from .html import Html, details, join, tag
from .line_chart import Drawn, Line, LineChart, draw, join_drawn
from .page import footer, page
from .run_tables import facts

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
    plots, data = _plots(number, sheets_of(record))
    figures = details("All figures", tag("div", tag("pre", text_table(record)), class_="scroll", tabindex=0))
    heading = tag("h2", f"{_ops(record)}, {record['date']}")
    parts = [heading, details(f"{record['device']}, torch {record['torch']}", facts([("file", str(path)), *about]))]
    return tag("section", *parts, plots, figures, id=f"result-{number}"), data


def _plots(number: int, sheets: Mapping[str, Sheet]) -> tuple[Html, list[dict[str, Any]]]:
    """Of each sheet first the bars, then the lines beside each other."""
    parts: list[Html | None] = []
    data: list[dict[str, Any]] = []
    for sheet in sheets.values():
        parts += [_bars(drawing) for drawing in sheet.drawings if isinstance(drawing, Bars)]
        charts = [drawing for drawing in sheet.drawings if isinstance(drawing, Lines)]
        drawn, of_sheet = join_drawn([_chart(f"chart-{number}-{len(data) + n}", each) for n, each in enumerate(charts)])
        parts.append(tag("div", drawn, class_="charts") if charts else None)
        parts.append(tag("p", sheet.note, class_="note"))
        data += of_sheet
    return join(parts), data


def _bars(bars: Bars) -> Html:
    groups: dict[str, list[Bar]] = {}
    for row in bars.rows:
        cells = [column.beside_bar(row) for column in bars.columns]
        bar = Bar(row["backend"], bars.value(row), _COLORS[role_of(row)], cells, whiskers=bars.ends(row))
        groups.setdefault(bars.group(row), []).append(bar)
    roof = f"; dashed: {bars.roof[0]}, {bars.roof[1]:,.1f}" if bars.roof else ""
    headings = ("", f"{bars.unit}{roof}", *(column.name for column in bars.columns))
    return bar_table(bars.title, headings, [Group(name, of_group) for name, of_group in groups.items()], bars.roof)


def _chart(key: str, drawn: Lines) -> Drawn:
    lines = [
        Line(line.name, list(zip(line.x, line.y, strict=True)), color)
        for line, color in zip(drawn.lines, (*_OF_LINES, *_OF_LINES), strict=False)
    ]
    if drawn.roof:
        over = list(zip(drawn.roof.x, drawn.roof.y, strict=True))
        lines.append(Line(drawn.roof.name, over, "six", dashed=True))
    x = logarithmic([size for line in drawn.lines for size in line.x], base=2) if drawn.by_size else None
    y = linear([value for line in lines for _, value in line.points if value is not None], from_zero=drawn.from_zero)
    return draw(LineChart(key, drawn.title, drawn.unit, lines, x, y, x_name="elements" if drawn.by_size else "step"))
