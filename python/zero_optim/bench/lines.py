"""The plot of ``endurance``: what a rank has, along the steps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .bars import BASELINE_COLOR, OURS_COLOR
from .figure import FAINT, FOOTER_INCHES, HEADER_INCHES, INK, header_and_footer, plain
from .samples import NOTE, Course, courses

PANEL_WIDTH, PANEL_HEIGHT = 4.6, 2.6
COLORS = {"stage2": OURS_COLOR, "stage3": "#56B4E9", "fused": BASELINE_COLOR, "ddp": BASELINE_COLOR, "fsdp2": "#777777"}


def draw_endurance(record: Mapping[str, Any], path: Path) -> None:
    """A row of panels for each number of ranks: memory, everything that is counted, time."""
    by_ranks = courses(record)
    width, height = 3 * PANEL_WIDTH, PANEL_HEIGHT * len(by_ranks) + HEADER_INCHES + FOOTER_INCHES
    body = (0, FOOTER_INCHES / height, 1, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    figure = Figure((width, height), layout=ConstrainedLayoutEngine(rect=body, h_pad=0.08, w_pad=0.12))
    for of_ranks, panels in zip(by_ranks, figure.subplots(len(by_ranks), 3, squeeze=False), strict=True):
        for course, axes in zip(of_ranks, panels, strict=True):
            _draw_course(course, axes)
        panels[0].legend(fontsize=8, frameon=False)
    header_and_footer(figure, record, NOTE)
    figure.savefig(path, dpi=140, facecolor="white")


def _draw_course(course: Course, axes: Axes) -> None:
    plain(axes)
    title = f"{course.title}, {course.unit}"
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold", color=INK)
    axes.set_xlabel("steps", fontsize=8, color=FAINT)
    for name, steps, figures in zip(course.names, course.steps, course.figures, strict=True):
        axes.plot(steps, figures, color=COLORS[name], lw=1.2, label=name)
    if course.from_zero:
        axes.set_ylim(bottom=0)
