"""A row of ``checkpoint``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...drawing.figures import elements
from ...drawing.sheet import Bars, Sheet
from ..columns import Column, JsonRow, RankRow, at, below_each_other, mebibytes, of_ranks, ratio, spread_at
from ..drawings import RowKind, bars_of


@dataclass(frozen=True)
class CheckpointRow(RankRow):
    """Times of saving and loading, of the slower rank: median, 20th and 80th percentile, in ms."""

    rounds: int
    written: int  # bytes, of all ranks
    save: list[float]  # until it is on the disk
    load: list[float]
    blocked: list[float]  # of saving, until training may go on
    of_disk: dict[str, float]  # the disk's time over this one's, in "save" and "load"
    extra: dict[str, int]  # the most extra bytes of a rank, in "save" and "load"


BACKEND = Column("", at("backend"), width=16, left=True)
TIMES = {part: replace(spread_at(part)[0], name=f"{part}, ms") for part in ("save", "blocked", "load")}
OF_DISK = {part: Column(f"{part}/disk", at("of_disk", part), ratio) for part in ("save", "load")}
EXTRA = {part: Column(f"{part} +MiB", at("extra", part), mebibytes) for part in ("save", "load")}
COLUMNS = (BACKEND, *TIMES.values(), *OF_DISK.values(), *EXTRA.values())
NOTE = "Medians of interleaved rounds, of the slower rank; whiskers: p20 to p80. '/disk': the disk's time over it."


def _about(row: JsonRow) -> str:
    return f"{elements(row['numel'])} parameters, {row['dtype']}, {row['written'] / 1e6:,.0f} MB"


def _table(rows: Sequence[JsonRow]) -> list[str]:
    first = rows[0]
    title = f"checkpoint: {_about(first)}, {first['ranks']} ranks; medians of {first['rounds']} rounds"
    return [title, *below_each_other(COLUMNS, rows, width=12)]


def _sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw the times of saving, of blocked training, and of loading."""
    titles = {
        "save": f"Saving, until all is on the disk: {_about(rows[0])}",
        "blocked": "Saving, until training may go on",
        "load": "Loading, from the disk",
    }
    return Sheet([[_bars(title, part, rows) for part, title in titles.items()]], NOTE)


def _bars(title: str, part: str, rows: Sequence[JsonRow]) -> Bars:
    columns = [of_parts[part] for of_parts in (TIMES, OF_DISK, EXTRA) if part in of_parts]
    return bars_of(rows, title, "ms", TIMES[part], spread_at(part)[1:], columns, of_ranks)


KIND = RowKind("checkpoint", "written", _table, _sheet)
