"""The table of a record, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .columns import JsonRow
from .record import sources_of
from .rows import kind_of


def table(record: Mapping[str, Any]) -> str:
    """Write device and versions, then a block of lines for each op, part, number of ranks and number of tokens."""
    lines = [f"{record['device']}; torch {record['torch']}; {sources_of(record)}"]
    for block in dict.fromkeys(map(_block_of, record["rows"])):
        rows = [row for row in record["rows"] if _block_of(row) == block]
        lines += ["", *kind_of(rows[0]).table(rows)]
    if record["baselines"]:
        lines += ["", *(f"{name}: {state}" for name, state in record["baselines"].items())]
    return "\n".join(lines)


def _block_of(row: JsonRow) -> tuple[Any, ...]:
    return row["op"], row.get("part"), row.get("ranks"), row.get("tokens")
