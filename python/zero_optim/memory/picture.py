"""Plans as a picture: a stacked bar for each stage, on an axis of its own. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from ..drawing.figures import size, unit_for
from .plan import Plan
from .table import kinds_of

_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
_LEAST_LABELLED = 0.035  # of the height of the axis: less has no room for its figure


def draw(path: Path, plans: Sequence[Plan], device_memory: int) -> None:
    """Write a PNG: what a rank holds on its device, by kind, and the device's memory as a line where it is in sight.

    Stages differ by factors of tens. So each has an axis of its own, and the figures are written on the bars.

    Raises OSError where it cannot be written, ValueError for a name that ends as no picture does.
    """
    kinds = [kind for kind in kinds_of(plans) if any(made.memory.get(kind) for made in plans)]
    colors = {kind: _COLORS[number % len(_COLORS)] for number, kind in enumerate(kinds)}
    figure_, (panels,) = pyplot.subplots(
        1, len(plans), figsize=(2.2 + 1.7 * len(plans), 4.2), layout="constrained", squeeze=False
    )
    handles: dict[str, Any] = {}
    for axes, made in zip(panels, plans, strict=True):
        _stack(axes, made, colors, device_memory)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = [label for label in (*kinds, *(label for label in handles if label not in kinds)) if label in handles]
    figure_.legend([handles[label] for label in shown[::-1]], shown[::-1], fontsize=8, loc="outside right center")
    first = plans[0]
    figure_.suptitle(f"{first.model.numel / 1e9:,.3g} B parameters, {first.job.world:,} ranks: memory of a rank")
    figure_.savefig(path, dpi=110)
    pyplot.close(figure_)


def _stack(axes: Any, made: Plan, colors: dict[str, str], device_memory: int) -> None:
    """The bar of one plan, in the unit that suits it."""
    unit = unit_for(made.most)
    top = 1.06 * made.most / unit.nbytes
    below = 0.0
    for kind, color in colors.items():
        height = made.memory.get(kind, 0) / unit.nbytes
        if height:
            bars = axes.bar([0], [height], 0.8, bottom=below, label=kind, color=color)
            if height > _LEAST_LABELLED * top:
                axes.bar_label(bars, [unit.cell(made.memory[kind])], label_type="center", fontsize=8, color="white")
        below += height
    if made.first_step:
        extra = made.first_step / unit.nbytes
        axes.bar([0], [extra], 0.8, bottom=below, label="in the first step", fill=False, ls=":", ec="grey")
    if device_memory / unit.nbytes < top:
        axes.axhline(device_memory / unit.nbytes, color="black", lw=0.8, ls="--", label=size(device_memory))
    axes.set(xticks=[], xlim=(-0.5, 0.5), ylim=(0, top), ylabel=unit.name)
    axes.set_title(f"stage {made.job.stage}\n{unit.cell(made.total)} {unit.name}", fontsize=10)
    axes.tick_params(labelsize=8)
