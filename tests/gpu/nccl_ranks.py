"""Runs a function on several NCCL ranks, on as many GPUs as there are, or all on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import run_ranks
from places import ON_GPU, why_not_nccl_ranks


def on_nccl_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, bound: bool = False, timeout: float = 60
) -> list[Any]:
    """`run_ranks` over NCCL. Skips the test, with the reason, where this machine can't. On a CPU, over gloo."""
    if reason := why_not_nccl_ranks(world_size):
        pytest.skip(reason)
    nccl = {"backend": "nccl", "bound": bound} if ON_GPU else {}
    return run_ranks(world_size, fn, *args, timeout=timeout, **nccl)
