"""A row of an op, of a training step, or of the cost of a parameter: one backend, dtype and size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from ...drawing.figures import elements
from ...drawing.sheet import Drawing, Line, Lines, Sheet
from ..columns import (
    MIB,
    Column,
    JsonRow,
    at,
    below_each_other,
    line_of,
    mebibytes,
    milliseconds,
    of_ranks,
    ratio,
    ratio_to,
    shown_by_some,
    whole,
)
from ..drawings import RowKind, bars_of
from ..timing import Spread

WIDTH = 100  # of a table


@dataclass(frozen=True)
class Row:
    """One op on one backend, dtype and size."""

    op: str
    backend: str
    dtype: str
    numel: int
    rounds: int
    ms: float
    p20: float
    p80: float
    bytes: float | None  # an element: the fewest that the op must move, read plus written
    gbps: float | None
    yardstick: str | None  # the backend whose speed is copy_gbps
    copy_gbps: float | None
    fraction: float | None
    vs_torch: float
    vs: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] | None = None
    launches: dict[str, int] | None = None
    parameters: int | None = None  # number of tensors that the elements are in
    ranks: int | None = None
    tokens_per_s: float | None = None  # of all ranks
    memory: dict[str, int] | None = None  # bytes of a rank
    loss: float | None = None  # of the last step
    baseline: str | None = None  # the backend whose time vs_torch is over this one's
    communicated: int | None = None  # bytes a step, of whole tensors
    keeps: str | None = None  # bytes a parameter of a rank of N
    tokens: int | None = None  # of a rank in a step
    newton_schulz: float | None = None  # its share of the step
    imbalance: float | None = None  # multiplications in it of the rank that has most, over the mean of ranks
    padding: float | None = None  # of the buckets of matrices to be made orthogonal, over their elements

    @classmethod
    def of_whole(
        cls, op: str, backend: str, dtype: str, numel: int, spread: Spread, vs_torch: float, **more: Any
    ) -> Row:
        """Make a row without bytes and yardstick, as of a training step, which has no least number of bytes."""
        unmeasured = dict.fromkeys(("bytes", "gbps", "yardstick", "copy_gbps", "fraction"))
        times = {"rounds": spread.rounds, "ms": spread.ms, "p20": spread.p20, "p80": spread.p80}
        return cls(op, backend, dtype, numel, **times, **unmeasured, vs_torch=round(vs_torch, 4), **more)  # type: ignore[arg-type]


# -- columns -----------------------------------------------------------------------------------------------------------

ELEMENTS = Column("elements", at("numel"), elements, width=9)
PARAMETERS = Column("parameters", at("parameters"), whole, width=12)
DTYPE = Column("dtype", at("dtype"), width=6, left=True)
BACKEND = Column("backend", at("backend"), width=15, left=True)
MS, P20, P80 = (Column(name, at(name), milliseconds, width=9) for name in ("ms", "p20", "p80"))
TOKENS_A_SECOND = Column("tokens/s", at("tokens_per_s"), "{:,.0f}".format)
STEADY, START, REST = (
    Column(name, at("memory", key), mebibytes)
    for name, key in (("MiB", "steady"), ("at start", "start"), ("at rest", "rest"))
)
COMMUNICATED = Column("comm. MiB", at("communicated"), mebibytes)
NEWTON_SCHULZ = Column("N.-Schulz", at("newton_schulz"), "{:.0%}".format)
IMBALANCE = Column("imbalance", at("imbalance"), "{:.2f}".format)
PADDING = Column("padding", at("padding"), "{:.1%}".format)
BYTES = Column("bytes", at("bytes"), "{:.4g}".format)
GBPS = Column("GB/s", at("gbps"), "{:,.1f}".format, width=9)
KERNELS = Column("kernels", at("launches", "kernels"), whole)


def _kernels_a_bucket(row: JsonRow) -> float | None:
    launches = row.get("launches") or {}
    return launches["kernels"] / launches["buckets"] if "buckets" in launches else None


KERNELS_A_BUCKET = Column("a bucket", _kernels_a_bucket, ratio)


def share_of_yardstick(rows: Sequence[JsonRow]) -> Column:
    """Make a column of the yardstick's time over the row's own."""
    return Column(f"of {rows[0]['yardstick']}", at("fraction"), "{:.3f}".format, ratio)


def versus(rows: Sequence[JsonRow]) -> Column:
    """Make a column of the baseline's time over the row's own. Several baselines are named by their common prefix."""
    named = [row["baseline"] for row in rows if row.get("baseline")]
    unnamed = "ddp" if rows[0].get("ranks") else "fused" if rows[0].get("parameters") else "torch"
    return ratio_to((commonprefix(named) or "torch") if named else unnamed, "vs_torch")


def _moved_per_second(percentile: str) -> Column:
    """Make a column of GB/s at a percentile of the time."""
    return Column("GB/s", lambda row: row["bytes"] * row["numel"] / 1e6 / row[percentile])


def _tokens_per_second(percentile: str) -> Column:
    return Column("tokens/s", lambda row: row["tokens_per_s"] * row["ms"] / row[percentile])


# -- the table ---------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[JsonRow]) -> list[str]:
    """Write a line a row, without size and dtype where they repeat the line above; then the times of phases."""
    columns = _columns(rows)
    headings, *_ = below_each_other(columns, [])
    if len(headings) > WIDTH:  # there are many baselines
        columns = [column for column in columns if column not in (P20, P80)]
        headings, *_ = below_each_other(columns, [])
    lines = [_title(rows), headings]
    seen: tuple[str, int] | None = None
    for row in rows:
        group = (row["dtype"], row["numel"])
        if seen not in (None, group):
            lines.append("")
        lines.append(line_of(columns, row, without=2 if seen == group else 0))
        seen = group
    return lines + _phases(rows)


def _title(rows: Sequence[JsonRow]) -> str:
    first = rows[0]
    counts = sorted({row["rounds"] for row in rows})
    rounds = f"medians of {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") + " rounds"
    ranks = f", {first['ranks']} ranks" if first.get("ranks") else ""
    ranks += f", {first['tokens']:,} tokens each" if first.get("tokens") else ""
    least = "" if first["bytes"] is None else f"{first['bytes']} bytes an element at the least; "
    return f"{first['op']}{ranks}: {least}{rounds}"


def _columns(rows: Sequence[JsonRow]) -> list[Column]:
    baselines = dict.fromkeys(name for row in rows for name in row["vs"])
    always = [ELEMENTS, DTYPE, PARAMETERS, BACKEND, MS, P20, P80, TOKENS_A_SECOND, STEADY, START, REST, COMMUNICATED]
    ratios = [versus(rows), *(ratio_to(name, "vs", name) for name in baselines)]
    bytes_differ = len({row["bytes"] for row in rows}) > 1
    muon = [NEWTON_SCHULZ, IMBALANCE, PADDING]
    columns = [*always, *[BYTES] * bytes_differ, GBPS, share_of_yardstick(rows), *ratios, *muon]
    columns += [KERNELS, KERNELS_A_BUCKET]
    return shown_by_some(columns, rows)


def _phases(rows: Sequence[JsonRow]) -> list[str]:
    lines = []
    for row in rows:
        if row.get("phases"):
            parts = "  ".join(f"{name} {milliseconds(value)}" for name, value in row["phases"].items())
            of = f", {row['parameters']:,} parameters" if row.get("parameters") else ""
            lines.append(f"  {row['dtype']} {row['backend']}{of}, ms: {parts}")
    return ["", *lines] if lines else []


# -- what a parameter costs --------------------------------------------------------------------------------------------

OVERHEADS = {
    "backward_overhead": "backward alone",
    "step_overhead": "step() alone",
    "loop_overhead": "backward, step() and zero_grad()",
}
INTERLEAVED = "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80"


def _overhead_sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw backward alone, ``step()`` alone, and the whole loop."""
    drawn = []
    for op, title in OVERHEADS.items():
        if of_op := [row for row in rows if row["op"] == op]:
            whole_title = f"{title}, {elements(of_op[0]['numel'])} elements"
            drawn.append(bars_of(of_op, whole_title, "ms", MS, (P20, P80), (MS, versus(of_op)), _parameters))
    return Sheet([drawn], f"{INTERLEAVED}. 'vs': fused's time over it, on several ranks ddp's.")


def _parameters(row: JsonRow) -> str:
    return f"{row['parameters']:,} parameters, {row['dtype']}, {of_ranks(row)}"


# -- a training step on ranks ------------------------------------------------------------------------------------------


def _ranks_sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw speed, and where they were measured, memory and communication."""
    title = f"Training step: {elements(rows[0]['numel'])} parameters, {rows[0]['dtype']}"
    speed = (TOKENS_A_SECOND, MS, versus(rows))
    slowest, fastest = _tokens_per_second("p80"), _tokens_per_second("p20")
    drawn = [bars_of(rows, title, "tokens/s", TOKENS_A_SECOND, (slowest, fastest), speed, _ranks)]
    if measured := [row for row in rows if row.get("memory")]:
        memory = shown_by_some((STEADY, START, REST), measured)
        drawn.append(bars_of(measured, "Peak memory of a rank", "MiB", STEADY, (STEADY, START), memory, _ranks, MIB))
    if counted := [row for row in rows if row.get("communicated")]:
        title, unit, ends = "Communicated by a rank in a step", "MiB, of whole tensors", (COMMUNICATED, COMMUNICATED)
        drawn.append(bars_of(counted, title, unit, COMMUNICATED, ends, (COMMUNICATED,), _ranks, MIB))
    note = (
        f"{INTERLEAVED}, and the peak while training starts.\n"
        "All train the same model on the same windows, and have the same losses but for rounding."
    )
    return Sheet([drawn], note)


def _ranks(row: JsonRow) -> str:
    """Name the group of a row: the topology, where a file has several, the ranks, and their tokens."""
    topology = "" if row["op"] in ("train_step", "stages") else f"{row['op'].replace('_', ' ')}, "
    return topology + of_ranks(row) + (f", {row['tokens']:,} tokens each" if row.get("tokens") else "")


# -- an op under the roof of the memory --------------------------------------------------------------------------------


def _bandwidth_sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw ops below each other and dtypes beside each other: speed over sizes, or bars where there is one size.

    For an op called in several ways, bars of all ways at the largest size stand below its lines."""
    rows = [row for row in rows if row["gbps"] is not None]
    ops, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("op", "dtype"))
    grid: list[list[Drawing | None]] = []
    for op in ops:
        of_op = [[row for row in rows if (row["op"], row["dtype"]) == (op, dtype)] for dtype in dtypes]
        plain, largest = [_plainly_called(some) for some in of_op], [_of_the_largest(some) for some in of_op]
        grid.append([_speed(some) for some in plain])
        if plain != of_op:
            grid.append([_speed(some) for some in largest])
    yardsticks = dict.fromkeys(row["yardstick"] for row in rows)
    note = (
        "GB/s: the bytes that the op must move over the median time; p20 to p80 shaded or as whiskers.\n"
        f"Dashed: {' or '.join(yardsticks)}, which moves as many and computes nothing; beside a line its share of that."
    )
    return Sheet(grid, note)


def _plainly_called(rows: list[JsonRow]) -> list[JsonRow]:
    """Leave out other ways of calling, whose names have a comma. Keep all where there is one size: bars have room."""
    if len({row["numel"] for row in rows}) < 2:
        return rows
    return [row for row in rows if ", " not in row["backend"]]


def _of_the_largest(rows: Sequence[JsonRow]) -> list[JsonRow]:
    largest = max((row["numel"] for row in rows), default=0)
    return [row for row in rows if row["numel"] == largest]


def _speed(rows: Sequence[JsonRow]) -> Drawing | None:
    if not rows:
        return None
    first = rows[0]
    yardstick = first["yardstick"]
    shown = [row for row in rows if row["backend"] != yardstick]
    title, unit = f"{first['op']}, {first['dtype']}", f"GB/s, {first['bytes']} bytes an element"
    ends = (_moved_per_second("p80"), _moved_per_second("p20"))
    share = share_of_yardstick(rows)
    if len({row["numel"] for row in rows}) == 1:
        title += f", {elements(first['numel'])} elements"
        columns, roof = (GBPS, share, versus(rows)), (yardstick, first["copy_gbps"])
        return bars_of(shown, title, unit, GBPS, ends, columns, roof=roof)

    def line(backend: str) -> Line:
        points = sorted((row for row in shown if row["backend"] == backend), key=at("numel"))
        sizes, speeds = ([row[key] for row in points] for key in ("numel", "gbps"))
        band = [(ends[0].value(row), ends[1].value(row)) for row in points]
        return Line(backend, sizes, speeds, share.beside_bar(points[-1]), band)

    ceiling = dict(sorted((row["numel"], row["copy_gbps"]) for row in rows))
    at_the_end = f"{[*ceiling.values()][-1]:,.0f} GB/s"
    lines = [line(backend) for backend in dict.fromkeys(row["backend"] for row in shown)]
    over = Line(yardstick, [*ceiling], [*ceiling.values()], at_the_end)
    return Lines(title, unit, lines, "elements", by_size=True, roof=over)


OVERHEAD = RowKind("overhead", "parameters", _table, _overhead_sheet)
RANKS = RowKind("ranks", "ranks", _table, _ranks_sheet)
BANDWIDTH = RowKind("bandwidth", "op", _table, _bandwidth_sheet)
