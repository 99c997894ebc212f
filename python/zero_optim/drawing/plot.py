"""Drawing of sheets as PNG, and of single drawings as SVG. Importing it needs matplotlib.

The same declaration gives the same SVG, byte for byte.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from .figures import elements, short
from .sheet import Bars, Drawing, Line, Lines, Look, Marks, Role, Scale, Sheet

ROOF, BEYOND, FAINT, INK, GRID, MARK = "#333333", "#F1F1F1", "#777777", "#222222", "#E3E3E3", "#C4003F"
# The colour-blind can tell these apart too (Okabe and Ito). A line without a colour below is grey.
BLUE, GREEN, SKY, ORANGE, RED, PINK, PURPLE, OCHRE = (
    *("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#8C6BB1", "#B8860B"),
)
OF_ROLES = {Role.OURS: BLUE, Role.BASELINE: RED, Role.OTHER: "#B9B9B9"}
OF_LINES = {
    **{"cuda": BLUE, "cpu": BLUE, "stage2": BLUE, "triton": GREEN, "reference": SKY, "stage3": SKY},
    **{"torch_pipeline": RED, "fused": RED, "ddp": RED, "apex": ORANGE, "norm": ORANGE},
    **{"deepspeed": PINK, "cat": PINK, "te": PURPLE, "foreach_copy": OCHRE},
    # of a run
    **{"training": BLUE, "held out": RED, "tokens/s": BLUE, "before clipping": BLUE, "clipped to": RED},
    **{"loss scale": PURPLE, "learning rate": GREEN},
    **{"data and forward": BLUE, "backward": GREEN, "step": ORANGE},
}
IN_TURN = (BLUE, GREEN, SKY, ORANGE, RED, PINK)
HEADER_INCHES, FOOTER_INCHES = 0.75, 0.55
WIDTH_INCHES, LINES_INCHES, BAR_INCHES, AROUND_BARS_INCHES = 6.3, 3.0, 0.27, 1.1
GAP = 0.6  # of a bar, between groups
FIRST_COLUMN, COLUMN = 36, 52  # points: right edge of the first column of figures beside bars, and to the next
LONG = 11  # a heading of as many letters, or more, is broken into two lines
DASHES = (0, (5, 2))
NUMBERS = FuncFormatter(lambda value, _: short(value, 6))
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
PATH, LONG_DECIMALS = re.compile(r'(?<= d=")[^"]+'), re.compile(r"(\.\d\d)\d+")


def png(sheet: Sheet, path: Path) -> None:
    """Write a sheet as a PNG file. Raises OSError where it cannot be written."""
    heights = [max(map(_inches, line)) for line in sheet.grid]
    columns = len(sheet.grid[0])
    header, footer = HEADER_INCHES if sheet.title else 0.1, FOOTER_INCHES if sheet.note else 0.1
    width, height = WIDTH_INCHES * columns, sum(heights) + header + footer
    figure = Figure((width, height), layout=_layout((0, footer / height, 1, 1 - (header + footer) / height)))
    panels = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for line, line_of_panels in zip(sheet.grid, panels, strict=True):
        for drawing, axes in zip(line, line_of_panels, strict=True):
            draw_panel(drawing, axes)
    left = 0.18 / width
    figure.text(left, 1 - 0.12 / height, sheet.title, fontsize=13, fontweight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.42 / height, sheet.details, fontsize=8, color=FAINT, va="top")
    figure.text(left, 0.14 / height, sheet.note, fontsize=7.5, color=FAINT, va="bottom")
    figure.savefig(path, dpi=140, facecolor="white")


def svg(drawing: Drawing) -> str:
    """Draw one panel on a transparent ground. Its words are text, in the reader's font."""
    figure = Figure((WIDTH_INCHES, _inches(drawing)), layout=_layout((0, 0, 1, 1)))
    draw_panel(drawing, figure.subplots())
    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "zero-optim"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata=NO_METADATA)
    # A hundredth of a point is more than anybody sees, and matplotlib writes millionths.
    return PATH.sub(lambda path: LONG_DECIMALS.sub(r"\1", path[0]), drawn.getvalue())


def _layout(body: tuple[float, float, float, float]) -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(rect=body, h_pad=0.08, w_pad=0.12)


def _inches(drawing: Drawing | None) -> float:
    if isinstance(drawing, Bars):
        return BAR_INCHES * (len(drawing.bars) + GAP * len({bar.group for bar in drawing.bars})) + AROUND_BARS_INCHES
    return LINES_INCHES if drawing else 0.0


def draw_panel(drawing: Drawing | None, axes: Axes) -> None:
    """Draw two thin axes, and bars or lines between them; for None leave the panel empty."""
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


# -- bars --------------------------------------------------------------------------------------------------------------


def _draw_bars(bars: Bars, axes: Axes) -> None:
    """Draw horizontal bars from the top, the name of a group above it, and figures in columns beside the bars."""
    y, heights, last = 0.0, [], ""
    for bar in bars.bars:
        if bar.group != last:
            y += GAP
            axes.text(0.005, y - 0.55, bar.group, transform=axes.get_yaxis_transform(), va="center", fontsize=8,
                      fontweight="bold", color=FAINT)  # fmt: skip
            last = bar.group
            y += 0.1
        _figures(axes, y, bar.figures, INK)
        heights.append(y)
        y += 1
    values = [bar.value for bar in bars.bars]
    below = [max(0.0, bar.value - bar.ends[0]) for bar in bars.bars]
    above = [max(0.0, bar.ends[1] - bar.value) for bar in bars.bars]
    axes.barh(heights, values, height=0.62, color=[OF_ROLES[bar.role] for bar in bars.bars], zorder=2)
    axes.errorbar(values, heights, xerr=[below, above], fmt="none", ecolor=ROOF, elinewidth=1, capsize=2.5, capthick=1,
                  zorder=3)  # fmt: skip
    names = [name if len(name) < LONG else name.replace(", ", ",\n").replace("vs ", "vs\n") for name in bars.headings]
    _figures(axes, -0.55, names, FAINT)
    axes.set_yticks(heights, [bar.name for bar in bars.bars], fontsize=8.5)
    longest = max(max(bar.value, *bar.ends) for bar in bars.bars)
    end = 1.05 * max(longest, bars.roof[1] if bars.roof else 0.0) or 1.0
    axes.set(ylim=(y - 0.45, -0.55), xlim=(0, end))
    axes.set_xlabel(bars.unit, fontsize=8, color=INK)
    axes.xaxis.set_major_formatter(NUMBERS)
    axes.tick_params(axis="y", length=0)
    if bars.roof:
        _draw_roof(*bars.roof, end, axes)


def _draw_roof(name: str, roof: float, end: float, axes: Axes) -> None:
    """Draw an upright line with its name above, and shade what is beyond it."""
    axes.axvspan(roof, end, color=BEYOND, lw=0, zorder=0)
    axes.axvline(roof, color=ROOF, lw=1.4, ls=DASHES, zorder=1)
    axes.annotate(f"{name} {roof:,.1f}", (roof, 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
                  textcoords="offset points", ha="right", va="bottom", fontsize=8, fontweight="bold",
                  color=ROOF)  # fmt: skip


def _figures(axes: Axes, y: float, texts: Sequence[str], color: str) -> None:
    """Write a line of the table at the right of the bars: figures, or, in FAINT, the headings."""
    for column, text in enumerate(texts):
        axes.annotate(text, (1, y), xycoords=axes.get_yaxis_transform(), xytext=(FIRST_COLUMN + COLUMN * column, 0),
                      textcoords="offset points", ha="right", va="bottom" if color == FAINT else "center",
                      fontsize=8, color=color)  # fmt: skip


# -- lines -------------------------------------------------------------------------------------------------------------


def _draw_lines(lines: Lines, axes: Axes) -> None:
    """Draw lines over sizes or steps, under a roof where there is one. The legend names what ends highest first."""
    roof = lines.roof
    if roof:
        axes.plot(roof.x, _numbers(roof.y), color=ROOF, lw=1.4, ls=DASHES, zorder=2, label=roof.label)
    if lines.stacked:
        _draw_stack(lines.lines, axes)
    else:
        colors = IN_TURN if lines.in_turn else [OF_LINES.get(line.name, FAINT) for line in lines.lines]
        colored = zip(lines.lines, itertools.cycle(colors))
        for line, color in sorted(colored, key=lambda pair: pair[0].last or 0.0, reverse=True):
            _draw_line(line, color, lines.by_size, axes)
    _set_y(lines, axes)
    if roof:
        axes.fill_between(roof.x, _numbers(roof.y), axes.get_ylim()[1], color=BEYOND, lw=0, zorder=0)
    _set_x(lines, axes)
    _draw_marks(lines.marks, axes)
    axes.grid(axis="y", color=GRID, lw=0.6)
    axes.set_ylabel(lines.unit, fontsize=8, color=INK)
    axes.set_xlabel(lines.x_name, fontsize=8, color=INK)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False, labelcolor="linecolor",
                reverse=lines.stacked)  # fmt: skip


def _numbers(values: Sequence[float | None]) -> list[float]:
    """Replace None by NaN, at which matplotlib leaves a gap."""
    return [math.nan if value is None else value for value in values]


def _draw_line(line: Line, color: str, with_dots: bool, axes: Axes) -> None:
    if line.band:
        low, high = map(_numbers, zip(*line.band, strict=True))
        axes.fill_between(line.x, low, high, color=color, alpha=0.2, lw=0.6)  # with an edge, so that a peak is seen
    alone = sum(value is not None for value in line.y) == 1  # a line of one point would be nothing
    mark = "o" if with_dots or alone or line.look is Look.DOTS else ""
    style = {Look.LINE: "-", Look.DASHED: DASHES, Look.DOTS: ""}[line.look]
    axes.plot(line.x, _numbers(line.y), color=color, lw=1.8 if with_dots else 1.2, ls=style, marker=mark,
              ms=4 if with_dots else 6, mec="white", mew=0.6, zorder=3, label=line.label)  # fmt: skip


def _draw_stack(lines: Sequence[Line], axes: Axes) -> None:
    """Draw stacked areas. A single step is widened: it would have no width."""
    x, heights = list(lines[0].x), [[value or 0.0 for value in line.y] for line in lines]
    if len(x) == 1:
        x, heights = [x[0] - 0.4, x[0] + 0.4], [values * 2 for values in heights]
    colors = [OF_LINES.get(line.name, FAINT) for line in lines]
    axes.stackplot(x, heights, colors=colors, alpha=0.85, lw=0, labels=[line.label for line in lines])


def _set_y(lines: Lines, axes: Axes) -> None:
    there = [value for line in lines.all_lines for value in line.values]
    if lines.scale in (Scale.TENS, Scale.TWOS):
        base = 10 if lines.scale is Scale.TENS else 2
        axes.set_yscale("log", base=base)
        if base == 2:  # all values may be equal, which would leave the axis no height
            axes.set_ylim(min(there) / 2, max(there) * 2)
        axes.yaxis.set_minor_locator(NullLocator())
    elif lines.scale is Scale.FROM_ZERO and not lines.stacked:
        axes.set_ylim(0, 1.12 * max(there, default=0) or 1)
    if lines.top is not None:
        low = min(there) if lines.scale is Scale.DATA else 0.0
        axes.set_ylim(low and low - 0.05 * (lines.top - low), lines.top)
    axes.yaxis.set_major_formatter(NUMBERS)


def _set_x(lines: Lines, axes: Axes) -> None:
    if lines.by_size:
        sizes = sorted({size for line in lines.all_lines for size in line.x})
        axes.set(xscale="log", xlim=(sizes[0] / 1.2, sizes[-1] * 1.2))
        axes.set_xticks(sizes)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda numel, _: elements(round(numel))))
    else:
        axes.margins(x=0.01)
        steps = {step for line in lines.lines for step in line.x}
        if len(steps) == 1:
            axes.set_xlim(min(steps) - 1, min(steps) + 1)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(NUMBERS)


def _draw_marks(marks: Marks, axes: Axes) -> None:
    """Draw marks over the whole height."""
    if marks.x:
        axes.vlines(marks.x, 0, 1, transform=axes.get_xaxis_transform(), color=MARK, lw=0.9, alpha=0.6, zorder=2,
                    label=marks.name)  # fmt: skip
