"""`gpu_overlap.py` and `gpu_stages.py`: which share of collectives, and of copies, lies under computation; and what is
wrong with a stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_overlap import hidden, shares, union
from gpu_stages import AMP, Trained, hidden_copies, problems


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


def test_copies_of_a_trace_are_told_by_their_direction() -> None:
    copies = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 0, "dur": 2000},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 5000, "dur": 1000},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 0, "dur": 9000},
    ]
    assert hidden_copies([*copies, kernel("gemm", 1500, 4000)]) == {
        "HtoD": {"copies": 1, "ms": 2.0, "hidden": 0.25},
        "DtoH": {"copies": 1, "ms": 1.0, "hidden": 0.0},
    }
    assert hidden_copies([kernel("gemm", 0, 1)]) == {}


def test_what_is_wrong_with_a_stage_is_told() -> None:
    gpu, losses = torch.device("cuda"), (5.0, 4.0)
    recipe = Trained(AMP, losses, held=200, peak=300, waits="its own affair")
    assert problems([recipe, Trained("stage 1", losses, held=102, peak=150, planned=100)], gpu) == []
    wrong = Trained("stage 2", (5.0, 4.1), held=104, peak=150, planned=100, waits="called a synchronizing operation")
    loss, memory, waits = problems([recipe, wrong], gpu)
    assert "stage 2: losses" in loss and "104 bytes held, 100 planned" in memory and "stage 2 waits" in waits
