"""`gpu_overlap.py`: which share of collectives lies under computation, from the events of a trace."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_overlap import hidden, shares, union


def kernel(name: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_spans_that_meet_are_one() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([(0, 9), (1, 2)]) == [(0, 9)]


def test_what_is_hidden_is_counted_once() -> None:
    assert hidden([(0, 10)], [(2, 4), (3, 5), (20, 30)]) == pytest.approx(0.3)
    assert hidden([(0, 10), (5, 15)], [(0, 15)]) == 1.0
    assert hidden([(0, 1)], []) == 0.0


def test_kernels_of_a_trace_are_told_by_their_names() -> None:
    events = [
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 0, 2000),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4000, 5000),
        kernel("ncclDevKernel_AllGather_RING_LL", 6000, 8000),
        kernel("gemm", 1000, 4000),
        {"cat": "cpu_op", "name": "nccl:all_gather", "ts": 0, "dur": 9000},
        {"name": "process_name"},
    ]
    assert shares(events) == {
        "reductions": {"kernels": 2, "ms": 3.0, "hidden": 0.3333},
        "gathers": {"kernels": 1, "ms": 2.0, "hidden": 0.0},
    }
    assert shares([kernel("gemm", 0, 1)]) == {}
