"""Draws the sheets of a record, one file each. Importing it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from .columns import elements
from .drawings import Bars, Drawing, Line, Lines, Sheet, role_of
from .record import sources_of
from .rows import sheets_of

ROOF, BEYOND, FAINT, INK, GRID = "#333333", "#F1F1F1", "#777777", "#222222", "#E3E3E3"
# The colour-blind can tell these apart too (Okabe and Ito). Who is in neither list is grey.
BLUE, GREEN, SKY, ORANGE, RED, PINK, PURPLE, OCHRE = (
    *("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#8C6BB1", "#B8860B"),
)
OF_ROLES = {"ours": BLUE, "baseline": RED, "other": "#B9B9B9"}
OF_LINES = {
    **{"cuda": BLUE, "cpu": BLUE, "stage2": BLUE, "triton": GREEN, "reference": SKY, "stage3": SKY},
    **{"torch_pipeline": RED, "fused": RED, "ddp": RED, "apex": ORANGE, "norm": ORANGE},
    **{"deepspeed": PINK, "cat": PINK, "te": PURPLE, "foreach_copy": OCHRE},
}
HEADER_INCHES, FOOTER_INCHES = 0.75, 0.55
WIDTH_INCHES, LINES_INCHES, BAR_INCHES, AROUND_BARS_INCHES = 6.3, 3.0, 0.27, 1.1
GAP = 0.6  # of a bar, between groups
FIRST_COLUMN, COLUMN = 36, 52  # points: right edge of the first column of figures beside bars, and to the next
LONG = 12  # letters of a heading, from which on it is in two lines
NAME, END, LETTER = 20, 94, 5.4  # points behind a panel: the name of a line; what is said of its end, or further on
LABEL_GAP = 0.075  # of the panel's height, between the labels of two lines


def draw(record: Mapping[str, Any], path: Path) -> list[Path]:
    """One sheet to ``path``, others beside it, with their kind behind the name. Returns the paths."""
    paths: list[Path] = []
    for name, sheet in sheets_of(record).items():
        paths.append(path.with_name(f"{path.stem}-{name}{path.suffix}") if paths else path)
        _draw_sheet(sheet, record, paths[-1])
    return paths


def _draw_sheet(sheet: Sheet, record: Mapping[str, Any], path: Path) -> None:
    heights = [max(map(_inches, line)) for line in sheet.grid]
    columns = len(sheet.grid[0])
    width, height = WIDTH_INCHES * columns, sum(heights) + HEADER_INCHES + FOOTER_INCHES
    body = (0, FOOTER_INCHES / height, 1, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    figure = Figure((width, height), layout=ConstrainedLayoutEngine(rect=body, h_pad=0.08, w_pad=0.12))
    panels = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for line, line_of_panels in zip(sheet.grid, panels, strict=True):
        for drawing, axes in zip(line, line_of_panels, strict=True):
            draw_panel(drawing, axes)
    _header_and_footer(figure, record, sheet.note)
    figure.savefig(path, dpi=140, facecolor="white")


def _inches(drawing: Drawing | None) -> float:
    if isinstance(drawing, Bars):
        return BAR_INCHES * (len(drawing.rows) + GAP * len(set(map(drawing.group, drawing.rows)))) + AROUND_BARS_INCHES
    return LINES_INCHES if drawing else 0.0


def _header_and_footer(figure: Figure, record: Mapping[str, Any], note: str) -> None:
    """The device and the versions above, the note below."""
    facts = {name: record[name] for name in ("torch", "cuda", "driver", "triton", "isa") if record[name]}
    details = "   ".join([*(f"{name} {fact}" for name, fact in facts.items()), sources_of(record), record["date"]])
    height = figure.get_figheight()
    left = 0.18 / figure.get_figwidth()
    figure.text(left, 1 - 0.12 / height, record["device"], fontsize=13, fontweight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.42 / height, details, fontsize=8, color=FAINT, va="top")
    figure.text(left, 0.14 / height, note, fontsize=7.5, color=FAINT, va="bottom")


def draw_panel(drawing: Drawing | None, axes: Axes) -> None:
    """Two thin axes, and what is drawn in between."""
    if drawing is None:
        axes.set_axis_off()
        return
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, width=0.6)
    axes.set_axisbelow(True)
    axes.set_title(drawing.title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=18)
    if isinstance(drawing, Bars):
        _draw_bars(drawing, axes)
    else:
        _draw_lines(drawing, axes)


def _beside(axes: Axes, points: float) -> Transform:
    """x from the panel's right edge, y in data."""
    return axes.get_yaxis_transform() + ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)


# -- bars --------------------------------------------------------------------------------------------------------------


def _draw_bars(bars: Bars, axes: Axes) -> None:
    """Horizontal bars from the top, a heading above each group that has a name, figures in columns beside them."""
    y, ticks, last = 0.0, [], ""
    for row in bars.rows:
        group = bars.group(row)
        if group != last:
            y += GAP
            above = axes.get_yaxis_transform()
            axes.text(0.005, y - 0.55, group, transform=above, va="center", fontsize=8, fontweight="bold", color=FAINT)
            last = group
            y += 0.1
        value, (low, high) = bars.value(row), bars.ends(row)
        axes.barh(y, value, height=0.62, color=OF_ROLES[role_of(row)], zorder=2)
        axes.errorbar(value, y, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color=ROOF, lw=1, capsize=2.5,
                      capthick=1, zorder=3)  # fmt: skip
        _figures(axes, y, [column.beside_bar(row) for column in bars.columns], INK)
        ticks.append(y)
        y += 1
    names = [column.name if len(column.name) < LONG else column.name.replace(", ", ",\n") for column in bars.columns]
    _figures(axes, -0.55, names, FAINT)
    axes.set_yticks(ticks, [row["backend"] for row in bars.rows], fontsize=8.5)
    longest = max(max(bars.value(row), *bars.ends(row)) for row in bars.rows)
    end = 1.05 * max(longest, bars.roof[1] if bars.roof else 0.0) or 1.0
    axes.set(ylim=(y - 0.45, -0.55), xlim=(0, end))
    axes.set_xlabel(bars.unit, fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    if bars.roof:
        _draw_roof(*bars.roof, end, axes)


def _draw_roof(name: str, roof: float, end: float, axes: Axes) -> None:
    """An upright line, and its name above."""
    axes.axvspan(roof, end, color=BEYOND, lw=0, zorder=0)
    axes.axvline(roof, color=ROOF, lw=1.4, ls=(0, (5, 2)), zorder=1)
    axes.annotate(f"{name} {roof:,.1f}", (roof, 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
                  textcoords="offset points", ha="right", va="bottom", fontsize=8, fontweight="bold",
                  color=ROOF)  # fmt: skip


def _figures(axes: Axes, y: float, texts: Sequence[str], color: str) -> None:
    """A line of the table at the right of the bars; above them, in FAINT, the heading."""
    for column, text in enumerate(texts):
        axes.annotate(text, (1, y), xycoords=_beside(axes, 0), xytext=(FIRST_COLUMN + COLUMN * column, 0),
                      textcoords="offset points", ha="right", va="bottom" if color == FAINT else "center",
                      fontsize=8, color=color)  # fmt: skip


# -- lines -------------------------------------------------------------------------------------------------------------


def _draw_lines(lines: Lines, axes: Axes) -> None:
    """Figures over sizes or steps, under a roof where there is one; at the end of a line its name, and a figure."""
    every = [*lines.lines, *([lines.roof] if lines.roof else [])]
    for line in lines.lines:
        color = OF_LINES.get(line.name, FAINT)
        if line.band:
            low, high = zip(*line.band, strict=True)
            axes.fill_between(line.x, low, high, color=color, alpha=0.15, lw=0)
        width, mark = (1.8, "o") if lines.by_size else (1.2, "")
        axes.plot(line.x, line.y, color=color, lw=width, marker=mark, ms=4, mec="white", mew=0.6, zorder=3)
    if lines.from_zero:
        axes.set_ylim(0, 1.12 * max(max(line.y) for line in every))
    if lines.roof:
        axes.fill_between(lines.roof.x, lines.roof.y, axes.get_ylim()[1], color=BEYOND, lw=0, zorder=0)
        axes.plot(lines.roof.x, lines.roof.y, color=ROOF, lw=1.4, ls=(0, (5, 2)), zorder=2)
    if lines.by_size:
        sizes = sorted({size for line in every for size in line.x})
        axes.set(xscale="log", xlim=(sizes[0] / 1.2, sizes[-1] * 1.2))
        axes.set_xticks(sizes)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda numel, _: elements(round(numel))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(axis="y", color=GRID, lw=0.6)
    axes.set_ylabel(lines.unit, fontsize=8, color=INK)
    axes.set_xlabel(lines.x_name, fontsize=8, color=INK)
    _label_ends(axes, every, lines.roof)


def _label_ends(axes: Axes, lines: Sequence[Line], roof: Line | None) -> None:
    """Names and figures at the right of the lines' ends, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    heights: list[float] = []
    ordered = sorted(lines, key=lambda line: line.y[-1])
    for line in ordered:
        heights.append(max(line.y[-1], heights[-1] + LABEL_GAP * (high - low)) if heights else line.y[-1])
    excess = max(0.0, heights[-1] - high)
    behind_names = max(END, NAME + LETTER * max(len(line.name) for line in lines))
    for line, y in zip(ordered, heights, strict=True):
        color = ROOF if line is roof else OF_LINES.get(line.name, FAINT)
        leader = {"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", (line.x[-1], line.y[-1]), (1, y - excess), textcoords=_beside(axes, NAME - 2),
                      arrowprops=leader)  # fmt: skip
        for text, points, weight in ((line.name, NAME, "bold"), (line.end, behind_names, "normal")):
            axes.text(1, y - excess, text, transform=_beside(axes, points), va="center", fontsize=8, color=color,
                      fontweight=weight)  # fmt: skip
