"""Runs what scripts of ``benchmarks`` run on ranks in the processes that tests keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import run_ranks


def on_pool(count: int, work: Callable[..., Any], *args: Any, **_: Any) -> list[Any]:
    """Do what ``ranks.on_ranks`` does: starting new processes takes seconds."""
    return run_ranks(count, _call, work, args)


def _call(rank: int, world_size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return work(*args)
