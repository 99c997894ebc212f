"""The roofline: bandwidth of each backend under that of the yardstick. Importing it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from .record import title

OURS = ("cuda", "cpu", "triton", "reference")


def roofline(record: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each op and dtype: lines over sizes, or bars where there is one size."""
    rows = [row for row in record["rows"] if row.get("gbps") is not None]
    ops, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("op", "dtype"))
    size = (6 * len(dtypes), 3.6 * len(ops))
    figure, axes = pyplot.subplots(len(ops), len(dtypes), squeeze=False, figsize=size, layout="constrained")
    for op, line in zip(ops, axes, strict=True):
        for dtype, axis in zip(dtypes, line, strict=True):
            _panel(axis, [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)])
    figure.suptitle(f"{title(record)}, {record['date']}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return axis.set_axis_off()
    yardstick = rows[0]["yardstick"]
    shown = [row for row in rows if row["backend"] != yardstick]
    sizes = sorted({row["numel"] for row in rows})
    axis.set_title(f"{rows[0]['op']}, {rows[0]['dtype']}, {rows[0]['bytes']:g} bytes an element", fontsize=9)
    if len(sizes) == 1:
        bars = axis.barh(
            [row["backend"] for row in shown],
            [row["gbps"] for row in shown],
            color=["C0" if row["backend"].startswith(OURS) else "0.7" for row in shown],
        )
        axis.bar_label(bars, [f"{row['fraction']:.2f}, {row['vs_torch']:.2f}x" for row in shown], fontsize=7, padding=3)
        axis.axvline(rows[0]["copy_gbps"], color="0.3", linestyle="--", label=yardstick)
        axis.invert_yaxis()
        axis.set_xlabel(f"GB/s; beside a bar its share of {yardstick}, and torch's time over it", fontsize=8)
    else:
        for backend in dict.fromkeys(row["backend"] for row in shown if ", " not in row["backend"]):
            points = sorted((row["numel"], row["gbps"]) for row in shown if row["backend"] == backend)
            axis.plot(
                *zip(*points, strict=True), marker="o", label=backend, color=None if backend.startswith(OURS) else "0.7"
            )
        roof = sorted({row["numel"]: row["copy_gbps"] for row in rows}.items())
        axis.plot(*zip(*roof, strict=True), color="0.3", linestyle="--", label=yardstick)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("elements", fontsize=8)
        axis.set_ylabel("GB/s", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7)
