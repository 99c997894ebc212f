"""The plots of ``step_overhead``, of training on ranks and of memory: bars and figures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .figure import FAINT, FOOTER_INCHES, HEADER_INCHES, INK, ROOF, figures, header_and_footer, plain
from .table import baseline_of, elements, mebibytes, milliseconds

JsonRow = Mapping[str, Any]

OURS_COLOR, OTHERS_COLOR, BASELINE_COLOR = "#0072B2", "#B9B9B9", "#D55E00"
COLORS = {"fused": BASELINE_COLOR, "foreach": "#E69F00", "ddp": BASELINE_COLOR, "disk": BASELINE_COLOR}
OURS = ("ours", "ours background", "stage0", "stage1", "stage2", "stage3", "stage3_keep")
BAR_INCHES, PANEL_WIDTH = 0.27, 6.3
GAP = 0.6  # of a bar, between groups


@dataclass(frozen=True)
class Panel:
    """Bars of ``value`` for each row; rows of one ``group`` stand together. ``columns``: figures by their heading."""

    title: str
    unit: str
    rows: Sequence[JsonRow]
    value: Callable[[JsonRow], float]
    whiskers: Callable[[JsonRow], tuple[float, float]]
    columns: Mapping[str, Callable[[JsonRow], str]]
    group: Callable[[JsonRow], str] = lambda row: ""


def draw_overhead(record: Mapping[str, Any], path: Path) -> None:
    """Backward and ``step()`` alone, and the loop that they are in."""
    titles = {
        "backward_overhead": "backward alone",
        "step_overhead": "step() alone",
        "loop_overhead": "backward, step() and zero_grad()",
    }
    panels = [
        Panel(
            title=f"{title}, {elements(rows[0]['numel'])} elements",
            unit="ms",
            rows=rows,
            value=lambda row: row["ms"],
            whiskers=lambda row: (row["p20"], row["p80"]),
            columns={"ms": lambda row: milliseconds(row["ms"]), "vs torch": lambda row: f"{row['vs_torch']:.2f}×"},
            group=_parameters,
        )
        for title, rows in ((title, _of(record, op)) for op, title in titles.items())
        if rows
    ]
    _draw(panels, record, path, "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80.")


def _parameters(row: JsonRow) -> str:
    return f"{row['parameters']:,} parameters, {row['dtype']}, {row['ranks'] or 1} rank{'s' * bool(row['ranks'])}"


def draw_ranks(record: Mapping[str, Any], path: Path) -> None:
    """Speed, and what was measured of memory and of communication."""
    rows = record["rows"]
    measured, counted = ([row for row in rows if row[name]] for name in ("memory", "communicated"))
    about = f"{elements(rows[0]['numel'])} parameters, {rows[0]['dtype']}"

    def ranks(row: JsonRow) -> str:
        return f"{row['ranks']} ranks" + (f", {row['tokens']:,} tokens each" if row["tokens"] else "")

    def at(row: JsonRow, ms: float) -> float:
        """Tokens a second."""
        return float(row["tokens_per_s"] * row["ms"] / ms)

    speed = Panel(
        title=f"Training step: {about}",
        unit="tokens/s",
        rows=rows,
        value=lambda row: row["tokens_per_s"],
        whiskers=lambda row: (at(row, row["p80"]), at(row, row["p20"])),
        group=ranks,
        columns={
            "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
            "ms": lambda row: milliseconds(row["ms"]),
            f"vs {baseline_of(rows)}": lambda row: f"{row['vs_torch']:.2f}×",
        },
    )
    memory = Panel(
        title="Peak memory of a rank",
        unit="MiB",
        rows=measured,
        value=lambda row: row["memory"]["steady"] / 2**20,
        whiskers=lambda row: (row["memory"]["steady"] / 2**20, row["memory"]["start"] / 2**20),
        columns={
            "MiB": lambda row: mebibytes(row["memory"]["steady"]),
            "at start": lambda row: mebibytes(row["memory"]["start"]),
            **(
                {"at rest": lambda row: mebibytes(row["memory"]["rest"])} if "rest" in (rows[0]["memory"] or ()) else {}
            ),
        },
        group=ranks,
    )
    communication = Panel(
        title="Communicated by a rank in a step",
        unit="MiB, of whole tensors",
        rows=counted,
        value=lambda row: row["communicated"] / 2**20,
        whiskers=lambda row: (row["communicated"] / 2**20,) * 2,
        columns={"MiB": lambda row: mebibytes(row["communicated"])},
        group=ranks,
    )
    note = (
        "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80, and the peak while training starts.\n"
        "All train the same model with fp32 masters on the same windows, clipped to the same norm."
    )
    _draw([panel for panel in (speed, memory, communication) if panel.rows], record, path, note)


def draw_walkthrough(record: Mapping[str, Any], path: Path) -> None:
    """What a rank has allocated, phase by phase: the first step, and one like all that follow."""
    rows = record["rows"]
    about = f"{elements(rows[0]['numel'])} parameters, {rows[0]['dtype']}, {rows[0]['ranks']} ranks"
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    later = [phase for phase in phases if phase.endswith(" 3")]
    first = [phase for phase in phases if phase not in later]
    panels = [
        Panel(
            title=title,
            unit="MiB",
            rows=[row for phase in of_panel for row in rows if row["phase"] == phase],
            value=lambda row: row["after"] / 2**20,
            whiskers=lambda row: (row["after"] / 2**20, row["peak"] / 2**20),
            columns={"after": lambda row: mebibytes(row["after"]), "peak": lambda row: mebibytes(row["peak"])},
            group=lambda row: row["phase"],
        )
        for title, of_panel in ((f"Memory of a rank: {about}", first), ("Two steps later", later))
    ]
    _draw(panels, record, path, "Bytes of live tensors after each phase; whiskers: the most within it.")


def draw_checkpoints(record: Mapping[str, Any], path: Path) -> None:
    """Saving, loading, and for how long training stands still."""
    rows = record["rows"]
    about = f"{elements(rows[0]['numel'])} parameters, {rows[0]['dtype']}, {rows[0]['written'] / 1e6:,.0f} MB"

    def ranks(row: JsonRow) -> str:
        return f"{row['ranks']:,} ranks"

    def panel(title: str, part: str, columns: Mapping[str, Callable[[JsonRow], str]]) -> Panel:
        return Panel(
            title=title,
            unit="ms",
            rows=rows,
            value=lambda row: row[part][0],
            whiskers=lambda row: (row[part][1], row[part][2]),
            columns={"ms": lambda row: milliseconds(row[part][0]), **columns},
            group=ranks,
        )

    def of_disk(part: str) -> dict[str, Callable[[JsonRow], str]]:
        return {
            "of disk": lambda row: f"{row['of_disk'][part]:.2f}",
            "MiB more": lambda row: mebibytes(row["extra"][part]),
        }

    panels = [
        panel(f"Saving, until all is on the disk: {about}", "save", of_disk("save")),
        panel("Saving, until training may go on", "blocked", {}),
        panel("Loading, from the disk", "load", of_disk("load")),
    ]
    note = (
        "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80. 'of disk': the disk's time over it."
    )
    _draw(panels, record, path, note)


def draw_scale(record: Mapping[str, Any], path: Path) -> None:
    """What the host does in a step, and how much of the buckets is padding, by ranks."""
    rows = record["rows"]
    about = f"{elements(rows[0]['numel'])} parameters, {rows[0]['dtype']}"

    def ranks(row: JsonRow) -> str:
        return f"{row['ranks']:,} ranks"

    def in_step(row: JsonRow) -> float:
        return sum(float(row["timed"][lap]) for lap in ("hooks", "step", "zero_grad"))

    def alike(value: Callable[[JsonRow], float]) -> Callable[[JsonRow], tuple[float, float]]:
        return lambda row: (value(row), value(row))

    python = Panel(
        title=f"Python in a step: {about}",
        unit="ms, of the hooks, step and zero_grad",
        rows=rows,
        value=in_step,
        whiskers=alike(in_step),
        columns={
            "ms": lambda row: milliseconds(in_step(row)),
            "buckets": lambda row: f"{row['buckets']:,}",
            "collectives": lambda row: f"{sum(row['collectives']['step'].values()):,}",
        },
        group=ranks,
    )
    padding = Panel(
        title="Padding of the buckets",
        unit="% of the parameters",
        rows=rows,
        value=lambda row: 100 * row["padding"],
        whiskers=alike(lambda row: 100 * row["padding"]),
        columns={
            "%": lambda row: f"{row['padding']:.3%}",
            "exchange": lambda row: f"{row['exchange'] / 1024:,.1f} KiB",
        },
        group=ranks,
    )
    note = (
        "One process plays rank 0; collectives are counted and go nowhere. Times are of one thread, on as many\n"
        "tensors, 1/4096 of their size, without kernels. Buckets, padding and the exchange are of the true shapes."
    )
    _draw([python, padding], record, path, note)


def _of(record: Mapping[str, Any], op: str) -> list[JsonRow]:
    return [row for row in record["rows"] if row["op"] == op]


def _draw(panels: Sequence[Panel], record: Mapping[str, Any], path: Path, note: str) -> None:
    bars = max(len(panel.rows) + GAP * len({panel.group(row) for row in panel.rows}) for panel in panels)
    width, height = PANEL_WIDTH * len(panels), BAR_INCHES * bars + 1.1 + HEADER_INCHES + FOOTER_INCHES
    body = (0, FOOTER_INCHES / height, 1, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    figure = Figure((width, height), layout=ConstrainedLayoutEngine(rect=body, h_pad=0.08, w_pad=0.12))
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw_panel(panel, axes)
    header_and_footer(figure, record, note)
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
        others = BASELINE_COLOR if name == row.get("baseline") else OTHERS_COLOR
        color = OURS_COLOR if name in OURS else COLORS.get(name, others)
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
