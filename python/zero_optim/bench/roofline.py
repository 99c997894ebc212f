"""The roofline of a record: bandwidth of every backend under that of the yardstick. Importing it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from .figure import (
    BEYOND,
    COLUMN,
    FAINT,
    FIRST_COLUMN,
    FOOTER_INCHES,
    HEADER_INCHES,
    INK,
    ROOF,
    beside,
    figures,
    header_and_footer,
    plain,
)
from .panels import bandwidth_note, speed_range, under_the_roof
from .table import elements

JsonRow = Mapping[str, Any]

# Ours in the strong colors, which the colour-blind can tell apart too (Okabe and Ito); who is not here is grey.
COLORS = {
    "cuda": "#0072B2",
    "cpu": "#0072B2",
    "triton": "#009E73",
    "reference": "#56B4E9",
    "torch_pipeline": "#D55E00",
    "deepspeed": "#CC79A7",
    "apex": "#E69F00",
    "te": "#8C6BB1",
    "foreach_copy": "#B8860B",
    "cat": "#CC79A7",
    "norm": "#E69F00",
}
PANEL_INCHES = (6.3, 3.0)
LABEL_GAP = 0.075  # of the panel's height, between the labels of two lines


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A panel an op and dtype: lines over the sizes, or bars where there is one size."""
    rows = [row for row in record["rows"] if row["gbps"] is not None]
    ops, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("op", "dtype"))
    width, height = PANEL_INCHES[0] * len(dtypes), PANEL_INCHES[1] * len(ops) + HEADER_INCHES + FOOTER_INCHES
    body = (0, FOOTER_INCHES / height, 1, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    figure = Figure((width, height), layout=ConstrainedLayoutEngine(rect=body, h_pad=0.08, w_pad=0.12))
    panels = figure.subplots(len(ops), len(dtypes), squeeze=False)
    for op, line in zip(ops, panels, strict=True):
        for dtype, axes in zip(dtypes, line, strict=True):
            _panel(axes, [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)])
    header_and_footer(figure, record, bandwidth_note(record))
    figure.savefig(path, dpi=140, facecolor="white")


def _panel(axes: Axes, rows: Sequence[JsonRow]) -> None:
    plain(axes)
    if not rows:
        axes.set_axis_off()
        return
    sizes = sorted({row["numel"] for row in rows})
    size = f"{elements(sizes[0])} elements, " if len(sizes) == 1 else ""
    title = f"{rows[0]['op']}, {rows[0]['dtype']}"
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=18)
    axes.annotate(f"{size}{rows[0]['bytes']} bytes an element", (1, 1), xycoords="axes fraction",
                  xytext=(FIRST_COLUMN + 2 * COLUMN, 18), textcoords="offset points", ha="right", va="baseline",
                  fontsize=8, color=FAINT)  # fmt: skip
    (_lines if len(sizes) > 1 else _bars)(axes, rows)


def _lines(axes: Axes, rows: Sequence[JsonRow]) -> None:
    """Bandwidth over the size, the roof above; the label at a line's end has its share of the roof there."""
    roof = sorted({(row["numel"], row["copy_gbps"]) for row in rows})
    top = 1.12 * max(max(row["gbps"] for row in rows), max(gbps for _, gbps in roof))
    sizes, ceiling = zip(*roof, strict=True)
    axes.fill_between(sizes, ceiling, top, color=BEYOND, lw=0, zorder=0)
    axes.plot(sizes, ceiling, color=ROOF, lw=1.4, ls=(0, (5, 2)), zorder=2)
    ends = [(rows[0]["yardstick"], roof[-1][1], f"{roof[-1][1]:,.0f} GB/s", ROOF)]
    for backend in under_the_roof(rows):
        points = sorted((row for row in rows if row["backend"] == backend), key=lambda row: row["numel"])
        x, y = [row["numel"] for row in points], [row["gbps"] for row in points]
        color = COLORS.get(backend, FAINT)
        low, high = zip(*map(speed_range, points), strict=True)
        axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
        axes.plot(x, y, color=color, lw=1.8, marker="o", ms=4, mec="white", mew=0.6, zorder=3)
        ends.append((backend, y[-1], f"{points[-1]['fraction']:.2f}", color))
    axes.set(xscale="log", ylim=(0, top), xlim=(sizes[0] / 1.2, sizes[-1] * 1.2))
    axes.set_xticks(sizes)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda numel, _: elements(round(numel))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda gbps, _: f"{gbps:,.0f}"))
    axes.grid(axis="y", color="#E3E3E3", lw=0.6)
    axes.set_ylabel("GB/s", fontsize=8, color=INK)
    axes.set_xlabel("elements", fontsize=8, color=INK)
    _label_ends(axes, ends, sizes[-1], top)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, float, str, str]], x: float, top: float) -> None:
    """Names and figures at the right of the lines' ends, moved apart where they would overlap."""
    heights: list[float] = []
    ordered = sorted(ends, key=lambda end: end[1])
    for _, y, _, _ in ordered:
        heights.append(max(y, heights[-1] + LABEL_GAP * top) if heights else y)
    excess = max(0.0, heights[-1] - top)
    for (name, end, figure, color), y in zip(ordered, heights, strict=True):
        leader = {"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", (x, end), (1, y - excess), textcoords=beside(axes, 18), arrowprops=leader)
        for text, points, weight in ((name, 20, "bold"), (figure, 94, "normal")):
            axes.text(1, y - excess, text, transform=beside(axes, points), va="center", fontsize=8, color=color,
                      fontweight=weight)  # fmt: skip


def _bars(axes: Axes, rows: Sequence[JsonRow]) -> None:
    """Bandwidth at the one size, the roof as an upright line; the figures in columns beside it."""
    roof, yardstick = rows[0]["copy_gbps"], rows[0]["yardstick"]
    shown = [row for row in rows if row["backend"] in under_the_roof(rows)]
    end = 1.05 * max([roof, *(speed_range(row)[1] for row in shown)])
    axes.axvspan(roof, end, color=BEYOND, lw=0, zorder=0)
    axes.axvline(roof, color=ROOF, lw=1.4, ls=(0, (5, 2)), zorder=1)
    name = f"{yardstick} {roof:,.1f} GB/s"
    axes.annotate(name, (roof, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
                  ha="right", va="bottom", fontsize=8, fontweight="bold", color=ROOF)  # fmt: skip
    for y, row in enumerate(shown):
        low, high = speed_range(row)
        whiskers = [[max(0.0, row["gbps"] - low)], [max(0.0, high - row["gbps"])]]
        axes.barh(y, row["gbps"], height=0.62, color=COLORS.get(row["backend"], FAINT), zorder=2)
        axes.errorbar(row["gbps"], y, xerr=whiskers, color=ROOF, lw=1, capsize=2.5, capthick=1, zorder=3)
        figures(axes, y, (f"{row['gbps']:,.1f}", f"{row['fraction']:.2f}", f"{row['vs_torch']:.2f}×"), INK)
    figures(axes, -0.55, ("GB/s", f"of {yardstick}", "vs torch"), FAINT)
    axes.set_yticks(range(len(shown)), [row["backend"] for row in shown], fontsize=8.5)
    axes.set(ylim=(len(shown) - 0.45, -0.55), xlim=(0, end))
    axes.set_xlabel("GB/s", fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
