"""The plotter of every result: ``python benchmarks/plot.py FILE.json ...`` prints its table and writes a PNG beside it.
With ``--update`` the PNG is the chart of README: one AdamW update by backend, of the largest size in the file.

API: ``draw(record, path)`` draws a record, ``table_of(record)`` writes its table, ``read(path)`` reads one, of any
schema from OLDEST on. Rows are drawn by the keys that they have (``KINDS``). A record with rows of several kinds has a
PNG for each: ``path``, then ``<stem>-<kind>.png``. Tables have nested keys as ``<outer> <inner>``, bytes as MiB.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from zero_optim.bench.record import SCHEMA, title
from zero_optim.bench.run import COLUMNS as OF_OPS
from zero_optim.bench.run import table
from zero_optim.errors import UsageError

OLDEST = 2  # the oldest schema that is read; its rows lack some keys
OURS = ("stage", "ours", "muon", "paged", "cpu", "nvme", "cuda", "triton", "None", "pages", "sleep", "wake")
OURS += ("CUDA", "Triton")
MIB = 2**20
BYTES = ("memory", "held", "moved", "extra", "peak", "after", "written", "communicated")
SPREADS = ("save", "load", "blocked")  # median, 20th and 80th percentile
IN_STEP = ("hooks", "step", "zero_grad")
ABOUT = ("part", "phase", "ranks", "replicas", "tokens", "parameters")
TIMES = (*SPREADS, *(f"timed {lap}" for lap in ("construction", "first step", *IN_STEP)))
COLUMNS = {
    **dict.fromkeys(("backend", *ABOUT), "{}"),
    **OF_OPS,
    **dict.fromkeys(
        ("versus", "freed", "of_disk save", "of_disk load", "newton_schulz", "imbalance", "padding", "loss"), "{:.3f}"
    ),
    "bound": "{}",
    "exposed_ms": "{:.1f}",
    "us_per_parameter": "{:.1f}",
    **dict.fromkeys(("tokens_per_s", "buckets", "largest", "exchange", "collectives"), "{:,.0f}"),
    **dict.fromkeys((*TIMES, "memory steady", "memory rest", "after", "peak", "communicated"), "{:,.1f}"),
    **dict.fromkeys(("held device", "held host", "held disk", "written", "extra save", "extra load"), "{:,.1f}"),
    **dict.fromkeys(("growth resident", "growth objects"), "{:.6f}"),
}
"""Form of each key that a table shows."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """A horizontal bar. ``whiskers``: low and high end; ``mark``: a line that the bar is compared with."""

    label: str
    value: float
    text: str
    whiskers: tuple[float, float] | None = None
    mark: float | None = None


@dataclass(frozen=True)
class Panel:
    """Bars, or lines by name; in ``lines`` x is a number or a word."""

    title: str
    unit: str
    bars: Sequence[Bar] = ()
    lines: Mapping[str, Sequence[tuple[Any, float]]] = field(default_factory=dict)
    x: str = ""


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """Read a record of any schema from OLDEST on; one without rows has none. Raises UsageError."""
    try:
        record = json.loads(path.read_text())
        schema = record["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no record of a benchmark: {error}") from error
    if not isinstance(schema, int) or not OLDEST <= schema <= SCHEMA:
        raise UsageError(f"{path} has schema {schema}; {OLDEST} to {SCHEMA} can be read")
    return {"version": None, "rows": [], **record}


def flat(row: Row) -> dict[str, Any]:
    """Flatten a row: no nested dicts but ``phases`` and ``samples``, ``time`` as ms, p20 and p80, bytes as MiB."""
    flattened: dict[str, Any] = {}
    for key, value in row.items():
        if key == "time":
            flattened |= zip(("ms", "p20", "p80"), value, strict=True)
        elif key in SPREADS:
            flattened |= zip((key, f"{key} p20", f"{key} p80"), value, strict=True)
        elif isinstance(value, Mapping) and key not in ("phases", "samples"):
            flattened |= {f"{key} {inner}": _unit(key, of_inner) for inner, of_inner in value.items()}
        else:
            flattened[key] = _unit(key, value)
    return flattened


def _unit(key: str, value: Any) -> Any:
    return value / MIB if key in BYTES and isinstance(value, int | float) else value


def table_of(record: Mapping[str, Any]) -> str:
    """Write the table of a record, with every key of its rows that COLUMNS names."""
    return table({**record, "rows": [flat(row) for row in record["rows"] if "op" in row]}, COLUMNS)


# -- what is drawn of each kind of rows --------------------------------------------------------------------------------


def blocks(rows: Iterable[Row], *keys: str) -> list[list[Row]]:
    """Group rows by their values of ``keys``, in order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return list(found.values())


def lines_of(rows: Iterable[Row], x: str, figure: Callable[[Row], float]) -> dict[str, list[tuple[Any, float]]]:
    """Make a line for each contender, over the key ``x``."""
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        replicas = row.get("replicas") or 1
        name = f"{row['backend']}, {replicas:,} replicas" if replicas > 1 else row["backend"]
        lines.setdefault(name, []).append((row[x], figure(row)))
    return lines


def about(row: Row) -> str:
    """Name what the rows of a panel have in common."""
    words = [str(row.get("part") or row["op"]), row["dtype"], f"{row['numel']:,} elements"]
    words += [f"{row[key]:,} {key}" for key in ABOUT[2:] if row.get(key)]
    return ", ".join(words)


def spread_bar(row: Row, key: str, text: str) -> Bar:
    low, high = ("p20", "p80") if key == "ms" else (f"{key} p20", f"{key} p80")
    bound = row["fraction"] * row[key] if key == "ms" and row.get("bound") else None
    return Bar(row["backend"], row[key], text, (row[low], row[high]), bound)


def of_bandwidth(rows: Sequence[Row]) -> list[list[Panel]]:
    """Draw bandwidth by op and dtype, under that of the yardstick: bars, or lines where there are several sizes."""
    return [[_bandwidth(of_dtype) for of_dtype in blocks(of_op, "dtype")] for of_op in blocks(rows, "op")]


def _bandwidth(rows: Sequence[Row]) -> Panel:
    yardstick = rows[0]["yardstick"]
    heading = f"{rows[0]['op']}, {rows[0]['dtype']}, {rows[0]['bytes']:g} bytes an element"
    if len({row["numel"] for row in rows}) > 1:
        shown = (row for row in rows if ", " not in row["backend"])  # without other forms of state
        return Panel(heading, "GB/s", lines=lines_of(shown, "numel", lambda row: row["gbps"]), x="elements")
    bars = [
        Bar(row["backend"], row["gbps"], f"{row['fraction']:.2f}, {row['vs_torch']:.2f}x", mark=row["copy_gbps"])
        for row in rows
        if row["backend"] != yardstick
    ]
    return Panel(f"{heading}; line: {yardstick}", "GB/s; its share of the line, and torch's time over it", bars)


def of_times(rows: Sequence[Row]) -> list[list[Panel]]:
    """Draw milliseconds, each with the part that it cannot be shorter than; of a training also the memory of a rank."""
    panels = []
    for block in blocks(rows, "op", "part", "dtype", "numel", "ranks", "replicas", "tokens", "parameters"):
        bound = "; line: the bound" if any(row.get("bound") for row in block) else ""
        bars = [spread_bar(row, "ms", _compared(row)) for row in block]
        panels.append([Panel(about(block[0]) + bound, "ms", bars)])
        peaks = [(row, row["memory steady"]) for row in block if row.get("memory steady") is not None]
        if peaks:
            bars = [Bar(row["backend"], peak, f"{peak:,.0f}", mark=row.get("memory rest")) for row, peak in peaks]
            panels[-1].append(Panel("peak of a rank; line: between steps", "MiB", bars))
    return panels


def _compared(row: Row) -> str:
    """Write a time, and what it is compared with."""
    forms = {
        "ms": "{:.4g}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "vs_torch": "{:.2f}x",
        "versus": "{:.2f}x None",
        "fraction": "{:.2f} of " + str(row.get("bound")),
    }
    return ", ".join(form.format(row[key]) for key, form in forms.items() if row.get(key) is not None)


def of_checkpoint(rows: Sequence[Row]) -> list[list[Panel]]:
    """Draw saving, until training may go on, and loading."""
    panels = []
    for block in blocks(rows, "dtype", "numel", "ranks"):
        panels.append([])
        for part, text in {"save": "{:.2f} of the disk", "load": "{:.2f} of the disk", "blocked": ""}.items():
            bars = [spread_bar(row, part, text.format(row.get(f"of_disk {part}"))) for row in block]
            panels[-1].append(Panel(f"{part}: {about(block[0])}", "ms", bars))
    return panels


def of_phases(rows: Sequence[Row]) -> list[list[Panel]]:
    """Draw memory over the phases of a training."""
    shown = {f"{key}: {about(rows[0])}": itemgetter(key) for key in ("after", "peak")}
    return [[Panel(of, "MiB of a rank", lines=lines_of(rows, "phase", figure)) for of, figure in shown.items()]]


def of_scale(rows: Sequence[Row]) -> list[list[Panel]]:
    """Draw Python's time and the padding over the number of ranks."""
    shown: dict[str, Callable[[Row], float]] = {
        "hooks, step and zero_grad, ms": lambda row: sum(row[f"timed {lap}"] for lap in IN_STEP),
        "construction, ms": lambda row: row["timed construction"],
        "padding, % of the parameters": lambda row: 100 * row["padding"],
    }
    heading = f"{rows[0]['parameters']} parameters"
    return [[Panel(heading, of, lines=lines_of(rows, "ranks", figure), x="ranks") for of, figure in shown.items()]]


UPDATES = {
    "torch_pipeline": "torch: unscale, AdamW(fused=True), cast",
    "cuda": "CUDA, fp32 masters",
    "triton": "Triton, fp32 masters",
    "cuda, split": "CUDA, split masters (the default)",
    "triton, split": "Triton, split masters",
    "cuda, split, int8": "CUDA, split masters, 8-bit moments",
    "copy": "a copy of as many bytes as fp32 masters need",
}
"""The bars of README's chart, by backend."""


def of_update(rows: Sequence[Row]) -> list[list[Panel]]:
    """Draw milliseconds of one bf16 update of the largest size, by backend."""
    updates = [row for row in rows if row.get("op") == "adam_step" and row["dtype"] == "bf16"]
    largest = max((row["numel"] for row in updates), default=0)
    by_backend = {row["backend"]: flat(row) for row in updates if row["numel"] == largest}
    shown = [(label, by_backend[backend]) for backend, label in UPDATES.items() if backend in by_backend]
    bars = [
        Bar(label, row["ms"], f"{row['ms']:.2f} ms, {row['bytes']:g} B, {row['vs_torch']:.2f}x") for label, row in shown
    ]
    heading = f"AdamW's update of {largest:,} bf16 parameters"
    return [[Panel(heading, "ms; bytes moved per parameter, and speed against torch", bars)]]


KINDS: Mapping[str, tuple[str, Callable[[Sequence[Row]], list[list[Panel]]]]] = {
    "roofline": ("gbps", of_bandwidth),
    "phases": ("phase", of_phases),
    "checkpoint": ("written", of_checkpoint),
    "scale": ("timed construction", of_scale),
    "times": ("ms", of_times),
}
"""By name: the key that rows of this kind have and no earlier kind does, and what draws them."""


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw(record: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw the record to ``path``. Returns the files written, one for each kind of rows, none where there are none."""
    kinds: dict[str, list[Row]] = {}
    for row in (flat(row) for row in record["rows"] if "op" in row):
        kind = next((name for name, (key, _) in KINDS.items() if row.get(key) is not None), None)
        if kind is not None:
            kinds.setdefault(kind, []).append(row)
    written = []
    for kind, rows in kinds.items():
        target = path.with_name(f"{path.stem}-{kind}.png") if written else path
        _figure(KINDS[kind][1](rows), f"{title(record)}, {record['date']}", target)
        written.append(target)
    return written


def _figure(lines: Sequence[Sequence[Panel]], heading: str, path: Path) -> None:
    import matplotlib  # scripts can do without it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(map(len, lines))
    heights = [max(1.2 + 0.3 * max(len(panel.bars) for panel in line), 3.2 if line[0].lines else 0) for line in lines]
    size = (6.5 * width, sum(heights) + 0.4)
    figure, axes = pyplot.subplots(
        len(lines), width, squeeze=False, figsize=size, height_ratios=heights, layout="constrained"
    )
    for line, of_line in zip(lines, axes, strict=True):
        for place, axis in enumerate(of_line):
            _panel(axis, line[place]) if place < len(line) else axis.set_axis_off()
    figure.suptitle(heading, fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _panel(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.title, fontsize=8)
    axis.tick_params(labelsize=7)
    if panel.bars:
        _bars(axis, panel.bars)
        axis.set_xlabel(panel.unit, fontsize=8)
        return
    for name, points in panel.lines.items():
        axis.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 20 else None, markersize=3)
    if panel.x in ("ranks", "elements"):
        axis.set_xscale("log", base=2)
    elif not panel.x:
        axis.tick_params(axis="x", rotation=40)
    axis.set_xlabel(panel.x, fontsize=8)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.legend(fontsize=7)


def _bars(axis: Any, bars: Sequence[Bar]) -> None:
    places = range(len(bars))  # rows may have equal names
    colors = ["C0" if bar.label.startswith(OURS) else "0.7" for bar in bars]
    axis.barh(places, [bar.value for bar in bars], color=colors)
    for place, bar in enumerate(bars):
        if bar.whiskers is not None:
            axis.plot(bar.whiskers, (place, place), color="0.2", linewidth=1)
        if bar.mark is not None:
            axis.plot((bar.mark, bar.mark), (place - 0.4, place + 0.4), color="C3", linewidth=2)
        end = max(bar.value, *(bar.whiskers or ()), bar.mark or 0.0)
        axis.annotate(bar.text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axis.set_yticks(places, [bar.label for bar in bars])
    axis.margins(x=0.3)
    axis.invert_yaxis()


def main(arguments: Sequence[str]) -> int:
    """Returns 1 where a file could not be read."""
    failures = 0
    for path in (Path(argument) for argument in arguments if argument != "--update"):
        try:
            record = read(path)
            if "--update" in arguments:
                target = path.with_name(f"{path.stem.removesuffix('-gpu')}-update.png")
                _figure(of_update(record["rows"]), f"{title(record)}, {record['date']}", target)
                continue
            written = draw(record, path.with_suffix(".png"))
            print(table_of(record) if written else f"{path}: skipped, as it has no rows to draw", *written, sep="\n")
        except UsageError as error:
            print(error, file=sys.stderr)
            failures += 1
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
