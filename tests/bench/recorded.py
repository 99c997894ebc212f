"""Runs a script of ``benchmarks`` in this process and on the ranks of tests, without its plot and its table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import run_ranks


def record_of(monkeypatch: pytest.MonkeyPatch, folder: Path, script: Any, *flags: str) -> dict[str, Any]:
    """Run ``script.main`` with ``flags``. Returns the content of its only file, which lies in ``folder``."""
    plot = SimpleNamespace(draw=lambda record, path: None, table_of=lambda record: "")
    monkeypatch.setitem(sys.modules, "plot", plot)
    assert script.main([*flags, "--out", str(folder)]) == 0
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())


def on_pool(count: int, work: Callable[..., Any], *args: Any, **_: Any) -> list[Any]:
    """Do what ``ranks.on_ranks`` does, in the processes that tests keep: starting new ones takes seconds."""
    return run_ranks(count, _call, work, args)


def _call(rank: int, world_size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return work(*args)
