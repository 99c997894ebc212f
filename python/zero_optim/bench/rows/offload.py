"""A row of ``offload``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...drawing.figures import elements
from ...drawing.sheet import Bars, Sheet
from ..columns import (
    MIB,
    Column,
    JsonRow,
    RankRow,
    at,
    below_each_other,
    mebibytes,
    milliseconds,
    ratio,
    ratio_to,
    spread_at,
)
from ..drawings import RowKind, bars_of


@dataclass(frozen=True)
class OffloadRow(RankRow):
    """A step with one store, moves of pages to and from a file, or a sleep. Times in ms, memory in bytes of a rank.

    Attributes:
        part: "step" is the update alone, "train" a whole step, "pages" the file against the disk, "sleep" the calls
            ``sleep`` and ``wake`` against a copy.
        time: median, 20th and 80th percentile.
        versus: None's time over this one's.
        moved: bytes moved in a step: to_device, to_host, read, written.
        held: bytes of the state by place: device, host, disk.
        peak: peak bytes in a step, less those before: resident; on a GPU, allocated there.
        beside: times of a step's additional parts, each measured apart: copies, disk, on a GPU the update on the host.
        hidden: share of ``beside`` that does not make the step longer than None's.
        bound: the longest part of a step, which it cannot be shorter than.
        fraction: that part's time over this one's.
        speculated: counts of shard updates made before the norm was known, since the start: right, redone.
        freed: asleep, the share of the device's memory to be freed that was; None: nothing sleeps.
    """

    rounds: int
    part: str
    time: list[float]
    versus: float | None
    moved: dict[str, int] | None
    held: dict[str, int] | None
    peak: int | None
    beside: dict[str, float]
    hidden: float | None
    bound: str | None
    fraction: float | None
    speculated: dict[str, int] | None
    freed: float | None = None


BACKEND, OF_MEMORY = (Column(name, at("backend"), width=19, left=True) for name in ("", "MiB of a rank"))
MS, P20, P80 = spread_at("time")
VERSUS = ratio_to("None", "versus")
APART = Column("apart, ms", lambda row: sum(row["beside"].values()) if row["beside"] else None, milliseconds)
HIDDEN = Column("hidden", at("hidden"), ratio, "{:.0%}".format)
OF_BOUND = Column("of bound", at("fraction"), ratio)
BOUND = Column("", lambda row: row["bound"] or "", "  {}".format, width=1)
PEAK = Column("peak", at("peak"), mebibytes)
HELD = [Column(place, at("held", place), mebibytes) for place in ("device", "host", "disk")]
MOVED = [
    Column(way.replace("_", " "), at("moved", way), mebibytes) for way in ("to_device", "to_host", "read", "written")
]
NOTE = (
    "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80. 'hidden': of what the store adds,\n"
    "measured apart, the part that makes a step no longer than None's. 'of bound': the longest part over the step."
)
FREED = Column("freed", at("freed"), "{:.2%}".format)
TITLES = {
    "step": "The update alone",
    "train": "A whole training step",
    "pages": "The file of nvme, against the disk",
    "sleep": "Sleep and wake, against a copy",
}
DRAWN = {
    "step": (MS, VERSUS, HIDDEN, OF_BOUND),
    "train": (MS, VERSUS, HIDDEN),
    "pages": (MS, OF_BOUND),
    "sleep": (MS, OF_BOUND),
}


def _table(rows: Sequence[JsonRow]) -> list[str]:
    """Write times and what they are compared with, then bytes."""
    first = rows[0]
    about = f"{elements(first['numel'])} parameters, {first['dtype']}, ranks: {first['ranks']}"
    columns = (BACKEND, MS, P20, P80, VERSUS, APART, HIDDEN, OF_BOUND, BOUND)
    lines = [f"offload, {first['part']}: {about}; medians of {first['rounds']} rounds"]
    lines += below_each_other(columns, rows, width=10)
    if first["part"] == "pages":
        return lines
    if first["part"] == "sleep":
        return [*lines, "", *below_each_other((OF_MEMORY, *HELD, FREED, *MOVED), rows, width=10)]
    lines += ["", *below_each_other((OF_MEMORY, *HELD, PEAK, *MOVED), rows, width=10)]
    for row in rows:
        if guesses := row["speculated"]:
            right, made = guesses["right"], sum(guesses.values())
            lines.append(f"  {row['backend']}: of {made:,} updates before the norm was known {right:,} were right")
    return lines


def _sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw the time of each part that the rows have, and the peak memory."""
    parts = {part: [row for row in rows if row["part"] == part] for part in TITLES}
    drawn = [_time(of_part) for of_part in parts.values() if of_part]
    measured = [row for row in rows if row["peak"] is not None]
    if measured:
        title = "Peak memory of a rank"
        drawn.append(bars_of(measured, title, "MiB", PEAK, (PEAK, PEAK), (PEAK,), lambda row: TITLES[row["part"]], MIB))
    return Sheet([drawn], NOTE)


def _time(rows: Sequence[JsonRow]) -> Bars:
    first = rows[0]
    title = f"{TITLES[first['part']]}: {elements(first['numel'])} parameters, {first['dtype']}"
    columns = DRAWN[first["part"]]
    return bars_of(rows, title, "ms", MS, (P20, P80), columns, lambda row: f"ranks: {row['ranks']}")


KIND = RowKind("offload", "part", _table, _sheet)
