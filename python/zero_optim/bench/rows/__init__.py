"""The kinds of rows that results are made of: one file for each kind of row, with its keys, its columns, its table and
what is drawn.

``op`` (an op; a training step on ranks; what a parameter costs), ``phase`` (of ``memory_walkthrough``), ``checkpoint``,
``offload``; ``scale`` and ``endurance``, which ``benchmarks/`` measures. A kind says all of it in the words of
``columns`` and ``drawings``. What a file lacks, because an older version wrote it, is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...drawing.sheet import Sheet
from ..columns import JsonRow
from ..drawings import Kind
from . import checkpoint, endurance, offload, op, phase, scale

KINDS = (
    *(offload.KIND, phase.KIND, scale.KIND, endurance.KIND, checkpoint.KIND),
    *(op.OVERHEAD, op.RANKS, op.BANDWIDTH),  # from the one with the most of its keys to the one with the fewest
)


def kind_of(row: JsonRow) -> Kind:
    """The first whose key the row has."""
    return next(kind for kind in KINDS if row.get(kind.key))


def sheets_of(record: Mapping[str, Any]) -> dict[str, Sheet]:
    """Collect what is drawn of a record, by the name of the kind, in the order of its rows. Most records have one
    kind."""
    rows_of: dict[Kind, list[JsonRow]] = {}
    for row in record["rows"]:
        rows_of.setdefault(kind_of(row), []).append(row)
    sheets = {kind.name: kind.sheet(rows) for kind, rows in rows_of.items()}
    return {name: sheet for name, sheet in sheets.items() if sheet.drawings}
