"""A row of ``bench_scale.py``: its keys, its table, and what is drawn. ``zero_optim.bench.rows`` imports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_optim.bench.columns import Column, JsonRow, RankRow, at, milliseconds, of_ranks, whole
from zero_optim.bench.drawings import RowKind, bars_of
from zero_optim.drawing.figures import elements
from zero_optim.drawing.sheet import Sheet


@dataclass(frozen=True)
class ScaleRow(RankRow):
    """The work of the host at so many ranks. ``timed`` and ``timed_buckets`` are of small tensors, all else of true
    shapes. ``of_bucket``: time of a small bucket, by part. ``replicas``: number of ranks that hold each part."""

    parameters: int
    buckets: int
    largest: int  # elements of a bucket
    padding: float  # over numel
    exchange: int  # bytes
    collectives: dict[str, dict[str, int]]  # by when, then kind: calls
    object_bytes: dict[str, int]  # by when: bytes of gathered objects that a rank receives
    rounds: int
    timed_buckets: int
    timed: dict[str, float]  # ms
    of_bucket: dict[str, float] | None = None  # microseconds, by part
    replicas: int = 1


BUCKETS = Column("buckets", at("buckets"), whole)
LARGEST = Column("largest, elements", at("largest"), elements)
PADDING = Column("padding", at("padding"), "{:.4%}".format, "{:.3%}".format)
EXCHANGE = Column("exchange, bytes", at("exchange"), whole)
TIMED_BUCKETS = Column("timed: buckets", at("timed_buckets"), whole)
IN_STEP = Column("ms", lambda row: sum(row["timed"][lap] for lap in ("hooks", "step", "zero_grad")), milliseconds)
COLLECTIVES = Column("collectives", lambda row: sum(row["collectives"]["step"].values()), whole)
NOTE = (
    "One process plays rank 0; collectives are counted and go nowhere. Times are of one thread, on as many\n"
    "tensors, 1/4096 of their size, without kernels. Buckets, padding and the exchange are of the true shapes."
)


def _table(rows: Sequence[JsonRow]) -> list[str]:
    """Write the stages of one number of ranks beside each other, a figure a line."""
    first = rows[0]
    about = f"{elements(first['numel'])} {first['dtype']} in {first['parameters']} parameters, {first['ranks']:,} ranks"
    about += f" in {first['replicas']:,} replicas" if first.get("replicas", 1) > 1 else ""
    columns = [BUCKETS, LARGEST, PADDING, EXCHANGE]
    for when in first["collectives"]:
        columns += [_calls(when, kind) for kind in sorted({kind for row in rows for kind in row["collectives"][when]})]
        columns.append(Column(f"{when}: bytes of objects", at("object_bytes", when), whole))
    columns.append(TIMED_BUCKETS)
    columns += [Column(f"timed: {what}, ms", at("timed", what), milliseconds) for what in first["timed"]]
    parts = list(dict.fromkeys(part for row in rows for part in row.get("of_bucket") or ()))
    columns += [Column(f"a small bucket: {part}, µs", at("of_bucket", part), "{:.1f}".format) for part in parts]
    if parts:
        columns.append(Column("a small bucket: all, µs", _whole_bucket, "{:.1f}".format))
    return [f"{first['op']}: {about}", *_beside_each_other(columns, rows)]


def _beside_each_other(columns: Sequence[Column], rows: Sequence[JsonRow]) -> list[str]:
    """Write the rows' names, and a line for each column."""
    lines = [("", [row["backend"] for row in rows])]
    lines += [(column.name, [column.text(row) for row in rows]) for column in columns]
    return [f"{name:<30}" + "".join(f"{text:>16}" for text in texts) for name, texts in lines]


def _calls(when: str, kind: str) -> Column:
    return Column(f"{when}: {kind}", lambda row: row["collectives"][when].get(kind, 0), whole)


def _whole_bucket(row: JsonRow) -> float | None:
    return sum(row["of_bucket"].values()) if row.get("of_bucket") else None


def _sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw Python's time in a step, and the padding of buckets, by ranks."""
    title = f"Python in a step: {elements(rows[0]['numel'])} parameters, {rows[0]['dtype']}"
    unit = "ms, of the hooks, step and zero_grad"
    python = bars_of(rows, title, unit, IN_STEP, (IN_STEP, IN_STEP), (IN_STEP, BUCKETS, COLLECTIVES), of_ranks)
    title, unit = "Padding of the buckets", "% of the parameters"
    padding = bars_of(rows, title, unit, PADDING, (PADDING, PADDING), (PADDING, EXCHANGE), of_ranks, 0.01)
    return Sheet([[python, padding]], NOTE)


KIND = RowKind("scale", "timed", _table, _sheet)
