"""Runs a script of ``benchmarks`` in this process, without its plot and its table, for the record that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def record_of(monkeypatch: pytest.MonkeyPatch, folder: Path, script: Any, *flags: str) -> dict[str, Any]:
    """Run ``script.main`` with ``flags``. Returns the content of its only file, which lies in ``folder``."""
    plot = SimpleNamespace(draw=lambda record, path: None, table_of=lambda record: "")
    monkeypatch.setitem(sys.modules, "plot", plot)
    assert script.main([*flags, "--out", str(folder)]) == 0
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())
