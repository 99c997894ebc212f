"""Draws the bars of a record, and their figures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .figure import FAINT, FOOTER_INCHES, HEADER_INCHES, INK, ROOF, figures, header_and_footer, plain
from .panels import Panel, Sheet, kind_of

OURS_COLOR, OTHERS_COLOR, BASELINE_COLOR = "#0072B2", "#B9B9B9", "#D55E00"
COLORS = {"ours": OURS_COLOR, "baseline": BASELINE_COLOR, "other": OTHERS_COLOR}
FOREACH_COLOR = "#E69F00"
BAR_INCHES, PANEL_WIDTH = 0.27, 6.3
GAP = 0.6  # of a bar, between groups


def draw_bars(sheet: Sheet, record: Mapping[str, Any], path: Path) -> None:
    panels = sheet.panels
    bars = max(len(panel.rows) + GAP * len({panel.group(row) for row in panel.rows}) for panel in panels)
    width, height = PANEL_WIDTH * len(panels), BAR_INCHES * bars + 1.1 + HEADER_INCHES + FOOTER_INCHES
    body = (0, FOOTER_INCHES / height, 1, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    figure = Figure((width, height), layout=ConstrainedLayoutEngine(rect=body, h_pad=0.08, w_pad=0.12))
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw_panel(panel, axes)
    header_and_footer(figure, record, sheet.note)
    figure.savefig(path, dpi=140, facecolor="white")


def draw_panel(panel: Panel, axes: Axes) -> None:
    """Horizontal bars from the top, a heading above each group that has a name."""
    plain(axes)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=18)
    y, ticks, names, last = 0.0, [], [], ""
    for row in panel.rows:
        group = panel.group(row)
        if group != last:
            y += GAP
            above = axes.get_yaxis_transform()
            axes.text(0.005, y - 0.55, group, transform=above, va="center", fontsize=8, fontweight="bold", color=FAINT)
            last = group
            y += 0.1
        name = row["backend"]
        value, (low, high) = panel.value(row), panel.whiskers(row)
        color = FOREACH_COLOR if name == "foreach" else COLORS[kind_of(row)]
        axes.barh(y, value, height=0.62, color=color, zorder=2)
        axes.errorbar(value, y, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color=ROOF, lw=1, capsize=2.5,
                      capthick=1, zorder=3)  # fmt: skip
        figures(axes, y, [text(row) for text in panel.columns.values()], INK)
        ticks.append(y)
        names.append(name)
        y += 1
    figures(axes, -0.55, list(panel.columns), FAINT)
    axes.set_yticks(ticks, names, fontsize=8.5)
    axes.set(
        ylim=(y - 0.45, -0.55), xlim=(0, 1.05 * (max(max(panel.value(r), *panel.whiskers(r)) for r in panel.rows) or 1))
    )
    axes.set_xlabel(panel.unit, fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
