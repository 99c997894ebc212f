"""The kinds of rows in results: a file for each, with its keys, columns, table and drawings.

``op`` (an op; a training step on ranks; what a parameter costs), ``phase`` (of ``memory_walkthrough``), ``checkpoint``,
``offload``. Kinds of ``SCRIPTS`` are in ``benchmarks/`` of a checkout, beside the scripts that measure them. All are
declared by ``columns`` and ``drawings``. A figure that an older version did not write is read as None.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from ...drawing.sheet import Sheet
from ...errors import UsageError
from ..columns import JsonRow
from ..drawings import RowKind
from ..record import CHECKOUT
from . import checkpoint, offload, op, phase

KINDS = (
    *(offload.KIND, phase.KIND, checkpoint.KIND),
    *(op.OVERHEAD, op.RANKS, op.BANDWIDTH),  # a row may have the keys of several: the most special kind comes first
)
SCRIPTS = ("scale", "endurance")


def kind_of(row: JsonRow) -> RowKind:
    """Choose the first kind whose key the row has. Raises UsageError for a row that cannot be shown here."""
    if row["op"] in SCRIPTS:
        return _kind_of_script(row["op"])
    return next(kind for kind in KINDS if row.get(kind.key))


@functools.cache
def _kind_of_script(op: str) -> RowKind:
    """Import the kind from ``benchmarks/<op>_row.py``, of this checkout or beside the running script."""
    sys.path.append(str(CHECKOUT / "benchmarks"))
    try:
        kind: RowKind = importlib.import_module(f"{op}_row").KIND
    except ImportError as error:
        raise UsageError(f"rows of {op} are shown in a checkout alone, by its benchmarks/{op}_row.py") from error
    return kind


def sheets_of(record: Mapping[str, Any]) -> dict[str, Sheet]:
    """Make a record's sheets, by the name of the kind, in the order of its rows. Most records have one kind."""
    rows_of: dict[RowKind, list[JsonRow]] = {}
    for row in record["rows"]:
        rows_of.setdefault(kind_of(row), []).append(row)
    sheets = {kind.name: kind.sheet(rows) for kind, rows in rows_of.items()}
    return {name: sheet for name, sheet in sheets.items() if sheet.drawings}
