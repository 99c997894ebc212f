"""What all plots share: the look of a panel, columns of figures beside it, header and footer. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation, Transform

from .record import sources_of

ROOF, BEYOND, FAINT, INK = "#333333", "#F1F1F1", "#777777", "#222222"
HEADER_INCHES, FOOTER_INCHES = 0.75, 0.55
FIRST_COLUMN, COLUMN = 36, 52  # points: right edge of the first column of figures beside bars, and to the next


def plain(axes: Axes) -> None:
    """A panel with two thin axes and nothing else."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, width=0.6)
    axes.set_axisbelow(True)


def beside(axes: Axes, points: float) -> Transform:
    """x from the panel's right edge, y in data."""
    return axes.get_yaxis_transform() + ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)


def figures(axes: Axes, y: float, texts: Sequence[str], color: str) -> None:
    """A line of the table at the right of the bars; above them, in FAINT, the heading."""
    for column, text in enumerate(texts):
        axes.annotate(text, (1, y), xycoords=beside(axes, 0), xytext=(FIRST_COLUMN + COLUMN * column, 0),
                      textcoords="offset points", ha="right", va="bottom" if color == FAINT else "center",
                      fontsize=8, color=color)  # fmt: skip


def header_and_footer(figure: Figure, record: Mapping[str, Any], note: str) -> None:
    """The device and the versions above, the note below."""
    facts = {name: record[name] for name in ("torch", "cuda", "driver", "triton", "isa") if record[name]}
    details = "   ".join([*(f"{name} {fact}" for name, fact in facts.items()), sources_of(record), record["date"]])
    height = figure.get_figheight()
    left = 0.18 / figure.get_figwidth()
    figure.text(left, 1 - 0.12 / height, record["device"], fontsize=13, fontweight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.42 / height, details, fontsize=8, color=FAINT, va="top")
    figure.text(left, 0.14 / height, note, fontsize=7.5, color=FAINT, va="bottom")
