"""Draws a result file, from the JSON alone: `python benchmarks/plot.py benchmarks/results/<device>/<file>.json`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"stream": "0.75", "cpu": "tab:blue", "torch": "tab:orange", "deepspeed": "tab:green"}


def label(row: dict[str, Any]) -> str:
    if row["backend"] == "stream":
        return f"{row['ms']:.1f} ms\n{row['gbps']:.0f} GB/s"
    return f"{row['ms']:.1f} ms\n{row['fraction']:.2f} of stream\n{row['vs_torch']:.2f}× torch"


def plot(source: Path) -> Path:
    """Write the plot beside the JSON file and return its path: a panel a dtype, a bar a backend, p20–p80 whiskers."""
    record = json.loads(source.read_text())
    dtypes = list(dict.fromkeys(row["dtype"] for row in record["rows"]))
    figure, panels = plt.subplots(1, len(dtypes), figsize=(4.6 * len(dtypes), 4.2), sharey=True, squeeze=False)
    for panel, dtype in zip(panels[0], dtypes, strict=True):
        rows = [row for row in record["rows"] if row["dtype"] == dtype]
        for x, row in enumerate(rows):
            whiskers = [[max(0.0, row["ms"] - row["p20"])], [max(0.0, row["p80"] - row["ms"])]]
            panel.bar(x, row["ms"], color=COLORS.get(row["backend"], "tab:gray"), yerr=whiskers, capsize=4)
            panel.annotate(label(row), (x, row["p80"]), ha="center", va="bottom", fontsize=8)
        panel.set_xticks(range(len(rows)), [row["backend"] for row in rows])
        panel.set_title(f"{rows[0]['op']}, {dtype}, {rows[0]['numel'] / 2**20:g} Mi elements", fontsize=10)
        panel.margins(y=0.25)
    panels[0][0].set_ylabel("ms, median; p20 to p80")
    versions = f"{record['device']}; torch {record['torch']}; commit {record['commit']}; {record['date']}"
    figure.suptitle(versions, fontsize=8, y=0.02, va="bottom")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    target = source.with_suffix(".png")
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(plot(Path(argument)))
