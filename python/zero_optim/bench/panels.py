"""What the bars of a record show, whoever draws them: values, whiskers, figures and notes, without matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .table import baseline_of, elements, mebibytes, milliseconds

JsonRow = Mapping[str, Any]

OURS = ("ours", "ours background", "stage0", "stage1", "stage2", "stage3", "stage3_keep", "cuda", "cpu", "triton",
        "paged 0", "paged half", "cpu no speculation", "nvme", "pages write", "pages read", "pages both")  # fmt: skip
BASELINES = ("None", "fused", "ddp", "disk", "torch_pipeline")


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
    roof: tuple[str, float] | None = None  # what no bar can exceed, and its value


@dataclass(frozen=True)
class Sheet:
    """All of a record that bars show. ``note``: what they are of."""

    panels: Sequence[Panel]
    note: str


def sheet_of(record: Mapping[str, Any]) -> Sheet | None:
    """The bars of a record; None for one that is drawn as lines along its steps."""
    first = record["rows"][0] if record["rows"] else {"ranks": None, "parameters": None}
    if first.get("samples"):
        return None
    kinds = {
        "part": offload_sheet,
        "phase": walkthrough_sheet,
        "timed": scale_sheet,
        "written": checkpoints_sheet,
        "parameters": overhead_sheet,
        "ranks": ranks_sheet,
    }
    return next((sheet for key, sheet in kinds.items() if first.get(key)), bandwidth_sheet)(record)


def kind_of(row: JsonRow) -> str:
    """Whether this is drawn as bars, and whose: with ``ours``, ``baseline`` and ``other`` each has a colour."""
    name = row["backend"]
    if name in OURS:
        return "ours"
    return "baseline" if name in BASELINES or name == row.get("baseline") else "other"


def overhead_sheet(record: Mapping[str, Any]) -> Sheet:
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
    return Sheet(panels, "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80.")


def _parameters(row: JsonRow) -> str:
    return f"{row['parameters']:,} parameters, {row['dtype']}, {row['ranks'] or 1} rank{'s' * bool(row['ranks'])}"


def ranks_sheet(record: Mapping[str, Any]) -> Sheet:
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
    return Sheet([panel for panel in (speed, memory, communication) if panel.rows], note)


def walkthrough_sheet(record: Mapping[str, Any]) -> Sheet:
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
    return Sheet(panels, "Bytes of live tensors after each phase; whiskers: the most within it.")


def checkpoints_sheet(record: Mapping[str, Any]) -> Sheet:
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
    return Sheet(panels, note)


def offload_sheet(record: Mapping[str, Any]) -> Sheet:
    """Time of a step by store, the file against the disk, and memory."""
    rows = [row for row in record["rows"] if row.get("part")]
    titles = {"step": "The update alone", "train": "A whole training step", "pages": "The file of nvme"}

    def time(part: str, of_part: Sequence[JsonRow]) -> Panel:
        versus = {"vs None": lambda row: f"{row['versus']:.2f}×" if row["versus"] else "-"}
        hidden = {"hidden": lambda row: "-" if row["hidden"] is None else f"{row['hidden']:.0%}"}
        bound = {"of bound": lambda row: "-" if row["fraction"] is None else f"{row['fraction']:.2f}"}
        more = {"step": versus | hidden | bound, "train": versus | hidden, "pages": {"of disk": bound["of bound"]}}
        return Panel(
            title=f"{titles[part]}: {elements(of_part[0]['numel'])} parameters, {of_part[0]['dtype']}",
            unit="ms",
            rows=of_part,
            value=lambda row: row["time"][0],
            whiskers=lambda row: (row["time"][1], row["time"][2]),
            columns={"ms": lambda row: milliseconds(row["time"][0]), **more[part]},
            group=lambda row: f"ranks: {row['ranks']}",
        )

    parts = {part: [row for row in rows if row["part"] == part] for part in titles}
    memory = Panel(
        title="Peak memory of a rank",
        unit="MiB",
        rows=[row for row in rows if row["peak"] is not None],
        value=lambda row: row["peak"] / 2**20,
        whiskers=lambda row: (row["peak"] / 2**20,) * 2,
        columns={"MiB": lambda row: mebibytes(row["peak"])},
        group=lambda row: titles[row["part"]],
    )
    panels = [*(time(part, of_part) for part, of_part in parts.items() if of_part), *([memory] if memory.rows else [])]
    note = (
        "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80. 'hidden': of what the store adds,\n"
        "measured apart, the part that makes a step no longer than None's. 'of bound': the longest part over the step."
    )
    return Sheet(panels, note)


def scale_sheet(record: Mapping[str, Any]) -> Sheet:
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
    return Sheet([python, padding], note)


def _of(record: Mapping[str, Any], op: str) -> list[JsonRow]:
    return [row for row in record["rows"] if row["op"] == op]


def bandwidth_sheet(record: Mapping[str, Any]) -> Sheet:
    """Speed of each op, dtype and size under that of the yardstick."""
    rows = [row for row in record["rows"] if row["gbps"] is not None]
    blocks = dict.fromkeys((row["op"], row["dtype"], row["numel"]) for row in rows)
    of_blocks = [[row for row in rows if (row["op"], row["dtype"], row["numel"]) == block] for block in blocks]
    return Sheet([_speed(of_block) for of_block in of_blocks], bandwidth_note(record))


def _speed(rows: Sequence[JsonRow]) -> Panel:
    first = rows[0]
    shown = under_the_roof(rows)
    return Panel(
        title=f"{first['op']}, {first['dtype']}, {elements(first['numel'])} elements",
        unit=f"GB/s, {first['bytes']} bytes an element",
        rows=[row for row in rows if row["backend"] in shown],
        value=lambda row: row["gbps"],
        whiskers=speed_range,
        columns={
            "GB/s": lambda row: f"{row['gbps']:,.1f}",
            f"of {first['yardstick']}": lambda row: f"{row['fraction']:.2f}",
            "vs torch": lambda row: f"{row['vs_torch']:.2f}×",
        },
        roof=(first["yardstick"], first["copy_gbps"]),
    )


def under_the_roof(rows: Sequence[JsonRow]) -> list[str]:
    """All but the yardstick, which is the roof."""
    return [name for name in dict.fromkeys(row["backend"] for row in rows) if name != rows[0]["yardstick"]]


def speed_range(row: JsonRow) -> tuple[float, float]:
    """GB/s at the 80th and at the 20th percentile of the time."""
    moved = row["bytes"] * row["numel"] / 1e6
    return moved / row["p80"], moved / row["p20"]


def bandwidth_note(record: Mapping[str, Any]) -> str:
    yardsticks = dict.fromkeys(row["yardstick"] for row in record["rows"] if row["yardstick"])
    return (
        "GB/s: the bytes that the op must move over the median time; p20 to p80 shaded or as whiskers.\n"
        f"Dashed: {' or '.join(yardsticks)}, which moves as many and computes nothing; beside a line its share of that."
    )
