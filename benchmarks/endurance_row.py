"""A row of ``bench_endurance.py``: its keys, its table, and what is drawn. ``zero_optim.bench.rows`` imports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_optim.bench.columns import JsonRow, RankRow, of_ranks
from zero_optim.bench.drawings import RowKind
from zero_optim.drawing.figures import elements
from zero_optim.drawing.sheet import Line, Lines, Scale, Sheet


@dataclass(frozen=True)
class EnduranceRow(RankRow):
    """The figures of a rank along a training of very many steps.

    Attributes:
        samples: by counter, a figure for each sample; ``step`` has the steps of the samples.
        growth: by counter, its growth a step over the second half.
    """

    steps: int
    samples: dict[str, list[float]]
    growth: dict[str, float]


COUNTED = ("objects", "tensors", "nodes", "hooks", "files", "threads")
NOTE = (
    "Each contender in processes of its own; of the rank that has most. Counted: "
    + ", ".join(COUNTED)
    + ". A step's time: median since the last sample."
)


def _table(rows: Sequence[JsonRow]) -> list[str]:
    """Write a counter a line."""
    first = rows[0]
    about = f"{elements(first['numel'])} {first['dtype']} parameters, ranks: {first['ranks']}"
    lines = [f"{first['op']}: {about}, {first['steps']:,} steps; growth a step in the second half"]
    lines.append(f"{'':<26}{'first':>14}{'middle':>14}{'last':>14}{'a step':>14}")
    for row in rows:
        for counter, growth in row["growth"].items():
            figures = row["samples"][counter]
            shown = (figures[0], figures[len(figures) // 2], figures[-1])
            texts = [f"{figure:>14,.3f}" if counter == "ms" else f"{figure:>14,}" for figure in shown]
            name = row["backend"] if counter == next(iter(row["growth"])) else ""
            unit = ", bytes" if counter == "resident" else ""
            lines.append(f"{name:<10}{counter + unit:<16}{''.join(texts)}{growth:>14.6f}")
    return lines


def _sheet(rows: Sequence[JsonRow]) -> Sheet:
    """Draw a line of drawings for each number of ranks."""
    numbers = dict.fromkeys(row["ranks"] for row in rows)
    return Sheet([_courses([row for row in rows if row["ranks"] == number]) for number in numbers], NOTE)


def _courses(rows: Sequence[JsonRow]) -> list[Lines]:
    """Draw memory, the sum of all counts, and time, along the steps."""
    ranks = of_ranks(rows[0])
    of_rows = [row["samples"] for row in rows]
    resident = [_since_first([figure / 2**10 for figure in samples["resident"]]) for samples in of_rows]
    counted = [_since_first([*map(sum, zip(*(samples[name] for name in COUNTED), strict=True))]) for samples in of_rows]
    times = [samples["ms"] for samples in of_rows]
    return [
        _course(f"{ranks}: resident memory", "KiB since the first sample", rows, resident, "{:+,.0f}", Scale.DATA),
        _course(f"{ranks}: all that is counted", "since the first sample", rows, counted, "{:+,.0f}", Scale.DATA),
        _course(f"{ranks}: a step", "ms", rows, times, "{:.3f}", Scale.FROM_ZERO),
    ]


def _course(
    title: str, unit: str, rows: Sequence[JsonRow], of_rows: Sequence[Sequence[float]], form: str, scale: Scale
) -> Lines:
    lines = [
        Line(row["backend"], row["samples"]["step"], figures, form.format(figures[-1]))
        for row, figures in zip(rows, of_rows, strict=True)
    ]
    return Lines(title, unit, lines, "steps", scale=scale)


def _since_first(figures: Sequence[float]) -> list[float]:
    return [figure - figures[0] for figure in figures]


KIND = RowKind("endurance", "samples", _table, _sheet)
