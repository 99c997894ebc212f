"""The plot of ``endurance``: what a rank has, along the steps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .bars import BASELINE_COLOR, OURS_COLOR
from .figure import FAINT, FOOTER_INCHES, HEADER_INCHES, INK, header_and_footer, plain

JsonRow = Mapping[str, Any]

PANEL_WIDTH, PANEL_HEIGHT = 4.6, 2.6
COLORS = {"stage2": OURS_COLOR, "stage3": "#56B4E9", "fused": BASELINE_COLOR, "ddp": BASELINE_COLOR, "fsdp2": "#777777"}
COUNTED = ("objects", "tensors", "nodes", "hooks", "files", "threads")
NOTE = (
    "Each contender in processes of its own; of the rank that has most. Counted: "
    + ", ".join(COUNTED)
    + ". A step's time: median since the last sample."
)


def draw_endurance(record: Mapping[str, Any], path: Path) -> None:
    """A row of panels for each number of ranks: memory, everything that is counted, time."""
    by_ranks = {count: [row for row in record["rows"] if row["ranks"] == count] for count in _counts(record["rows"])}
    width, height = 3 * PANEL_WIDTH, PANEL_HEIGHT * len(by_ranks) + HEADER_INCHES + FOOTER_INCHES
    body = (0, FOOTER_INCHES / height, 1, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    figure = Figure((width, height), layout=ConstrainedLayoutEngine(rect=body, h_pad=0.08, w_pad=0.12))
    for rows, panels in zip(by_ranks.values(), figure.subplots(len(by_ranks), 3, squeeze=False), strict=True):
        draw_rows(rows, panels)
    header_and_footer(figure, record, NOTE)
    figure.savefig(path, dpi=140, facecolor="white")


def _counts(rows: Sequence[JsonRow]) -> list[int]:
    return list(dict.fromkeys(row["ranks"] for row in rows))


def draw_rows(rows: Sequence[JsonRow], panels: Sequence[Axes]) -> None:
    ranks = f"{rows[0]['ranks']} rank{'s' * (rows[0]['ranks'] > 1)}"
    titles = ("resident memory, KiB since the first sample", "all that is counted, since the first", "a step, ms")
    for axes, title in zip(panels, titles, strict=True):
        plain(axes)
        axes.set_title(f"{ranks}: {title}", loc="left", fontsize=9, fontweight="bold", color=INK)
        axes.set_xlabel("steps", fontsize=8, color=FAINT)
    for row in rows:
        samples, style = row["samples"], {"color": COLORS[row["backend"]], "lw": 1.2, "label": row["backend"]}
        counted = [sum(of_sample) for of_sample in zip(*(samples[name] for name in COUNTED), strict=True)]
        for axes, figures in zip(panels, (_kibibytes(samples["resident"]), counted, samples["ms"]), strict=True):
            since = 0 if axes is panels[2] else figures[0]
            axes.plot(samples["step"], [figure - since for figure in figures], **style)
    panels[2].set_ylim(bottom=0)
    panels[0].legend(fontsize=8, frameon=False)


def _kibibytes(figures: Sequence[float]) -> list[float]:
    return [figure / 2**10 for figure in figures]
