"""Plans as a picture: stacked bars, one a stage. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from .plan import Plan
from .table import GB, figure, gigabytes, kinds_of, name_of

_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")


def draw(path: Path, plans: Sequence[Plan], device_memory: int) -> None:
    """Write a PNG: what a rank holds on its device, by kind, and the device's memory as a line where it is in sight.

    Raises OSError where it cannot be written, ValueError for a name that ends as no picture does.
    """
    kinds = [kind for kind in kinds_of(plans) if any(made.memory.get(kind) for made in plans)]
    places = range(len(plans))
    figure_, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    below = [0.0] * len(plans)
    for number, kind in enumerate(kinds):
        sizes = [made.memory.get(kind, 0) / GB for made in plans]
        color = _COLORS[number % len(_COLORS)]
        axes.bar(places, sizes, 0.6, bottom=below, label=name_of(kind), color=color)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    extra = [made.first_step / GB for made in plans]
    if any(extra):
        axes.bar(places, extra, 0.6, bottom=below, label="in the first step", fill=False, ls=":", ec="grey")
    tops = [made.most / GB for made in plans]
    for place, top, made in zip(places, tops, plans, strict=True):
        axes.annotate(gigabytes(made.total), (place, top), ha="center", va="bottom", fontsize=8)
    if device_memory / GB < 1.1 * max(tops):
        axes.axhline(device_memory / GB, color="black", lw=0.8, ls="--", label=figure(device_memory))
    first = plans[0]
    axes.set_xticks(list(places), [f"stage {made.job.stage}" for made in plans])
    axes.set(ylabel="GB a rank", title=f"{first.model.numel / 1e9:,.3g} B parameters, {first.job.world:,} ranks")
    axes.margins(y=0.1)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure_.savefig(path, dpi=100)
    pyplot.close(figure_)
