"""Drawing of a record's sheets, one file each. Importing it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..drawing.plot import png
from .record import sources_of
from .rows import sheets_of


def draw(record: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw the first sheet to ``path``, and others beside it with their kind behind the name. Returns the paths.

    Device and versions stand above each sheet.
    """
    facts = {name: record[name] for name in ("torch", "cuda", "driver", "triton", "isa") if record[name]}
    details = "   ".join([*(f"{name} {fact}" for name, fact in facts.items()), sources_of(record), record["date"]])
    paths: list[Path] = []
    for name, sheet in sheets_of(record).items():
        paths.append(path.with_name(f"{path.stem}-{name}{path.suffix}") if paths else path)
        png(replace(sheet, title=record["device"], details=details), paths[-1])
    return paths
