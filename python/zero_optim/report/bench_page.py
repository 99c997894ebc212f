"""The page of benchmark results: bars and lines drawn from the JSON files, and their tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.record import has_ops, read
from ..bench.rows import sheets_of
from ..bench.table import table as text_table
from ..errors import UsageError
from ..train.run_dir import PAGE
from .charts import Chart, cards, data, missing
from .html import Html, details, join, tag
from .page import footer, page
from .run_tables import facts

_COLORS = "Of bars: blue is ours, orange is what others are compared with, grey are all others."
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
    """Find the bench's JSON files in a folder and below it, the newest first by name."""
    files = [path for path in folder.rglob("*.json") if path.is_file()]
    return sorted(filter(_is_result, files), key=lambda path: path.name, reverse=True)


def _is_result(path: Path) -> bool:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and {"schema", "rows", "baselines"} <= said.keys() and has_ops(said["rows"])


def write_bench_page(source: Path, out: Path | None = None) -> Path:
    """Write the page of one result beside it, or of all results in a folder as ``report.html`` there; or as ``out``.

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
    """Make the HTML. Its ``<script id="data">`` has the records as they are read, and the points of charts."""
    records = [read(path) for path in paths]
    sections, charts = [], []
    for number, (path, record) in enumerate(zip(paths, records, strict=True)):
        html, of_section = _section(number, path, record)
        sections.append(html)
        charts += of_section
    title = f"Benchmarks: {name}"
    contents = _contents(records) if len(records) > 1 else None
    header = tag("header", tag("h1", title), missing() or tag("p", _COLORS, class_="faint"))
    body = [header, contents, *sections, footer("The page is one file, and fetches nothing.")]
    named = [{"file": str(path), **record} for path, record in zip(paths, records, strict=True)]
    return page(title, join(body), {"results": named, "charts": charts})


def _contents(records: Sequence[dict[str, Any]]) -> Html:
    names = [f"{_ops(record)}, {record['date']}" for record in records]
    links = (tag("li", tag("a", name, href=f"#result-{number}")) for number, name in enumerate(names))
    return tag("nav", tag("ul", *links), aria_label="Results")


def _ops(record: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(str(row["op"]) for row in record["rows"])) or "no rows"


def _section(number: int, path: Path, record: dict[str, Any]) -> tuple[Html, list[dict[str, Any]]]:
    """Make a record's section: the drawings and the note of each sheet, then all figures as text."""
    about = [(name, str(record[name])) for name in _FACTS if record.get(name) is not None]
    about += [(name, str(state)) for name, state in record["baselines"].items()]
    heading = tag("h2", f"{_ops(record)}, {record['date']}")
    parts = [heading, details(f"{record['device']}, torch {record['torch']}", facts([("file", str(path)), *about]))]
    charts: list[Chart] = []
    for sheet in sheets_of(record).values():
        of_sheet = [Chart(f"chart-{number}-{len(charts) + n}", drawing) for n, drawing in enumerate(sheet.drawings)]
        charts += of_sheet
        parts += [cards(of_sheet), tag("p", sheet.note, class_="note")]
    figures = details("All figures", tag("div", tag("pre", text_table(record)), class_="scroll", tabindex=0))
    return tag("section", *parts, figures, id=f"result-{number}"), data(charts)
