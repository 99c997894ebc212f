"""What an endurance run has along its steps, whoever draws it, without matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JsonRow = Mapping[str, Any]

COUNTED = ("objects", "tensors", "nodes", "hooks", "files", "threads")
NOTE = (
    "Each contender in processes of its own; of the rank that has most. Counted: "
    + ", ".join(COUNTED)
    + ". A step's time: median since the last sample."
)


@dataclass(frozen=True)
class Course:
    """What all contenders of one number of ranks have of one thing: for each its figures at its ``steps``."""

    title: str
    unit: str
    names: Sequence[str]
    steps: Sequence[Sequence[float]]
    figures: Sequence[Sequence[float]]
    from_zero: bool


def courses(record: Mapping[str, Any]) -> list[list[Course]]:
    """Of each number of ranks: memory, everything that is counted, and time."""
    rows = record["rows"]
    return [
        _courses([row for row in rows if row["ranks"] == ranks]) for ranks in dict.fromkeys(r["ranks"] for r in rows)
    ]


def _courses(rows: Sequence[JsonRow]) -> list[Course]:
    ranks = f"{rows[0]['ranks']} rank{'s' * (rows[0]['ranks'] > 1)}"
    of_rows = [row["samples"] for row in rows]
    resident = [[figure / 2**10 for figure in samples["resident"]] for samples in of_rows]
    counted = [list(map(sum, zip(*(samples[name] for name in COUNTED), strict=True))) for samples in of_rows]
    names, steps = [row["backend"] for row in rows], [samples["step"] for samples in of_rows]
    return [
        Course(f"{ranks}: resident memory", "KiB since the first sample", names, steps, _since_first(resident), False),
        Course(f"{ranks}: all that is counted", "since the first sample", names, steps, _since_first(counted), False),
        Course(f"{ranks}: a step", "ms", names, steps, [samples["ms"] for samples in of_rows], True),
    ]


def _since_first(of_rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[figure - figures[0] for figure in figures] for figures in of_rows]
