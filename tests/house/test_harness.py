"""The harness itself: results in rank order, failures with tracebacks, no hang, and a working pool afterwards."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, float, int]:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, float(value), os.getpid()


def _raise_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the culprit")
    dist.barrier()


def _die_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _wait_for_ever(rank: int, world_size: int) -> None:
    signal.pause()


def _complain_and_raise(rank: int, world_size: int) -> None:
    print(f"a library's words on rank {rank}", file=sys.stderr, flush=True)
    raise ValueError("the culprit")


def _unpicklable(rank: int, world_size: int):
    return lambda: None


def test_results_come_in_rank_order_from_reused_processes():
    first = run_ranks(3, _sum_of_ranks, 10)
    assert [(rank, total) for rank, total, _ in first] == [(0, 33.0), (1, 33.0), (2, 33.0)]
    second = run_ranks(2, _sum_of_ranks, 1)
    assert [(rank, total) for rank, total, _ in second] == [(0, 3.0), (1, 3.0)]
    assert [pid for *_, pid in second] == [pid for *_, pid in first][:2]


@pytest.mark.parametrize(
    ("fn", "text"),
    [(_raise_on_rank_one, "the culprit"), (_die_on_rank_one, "exit code -9"), (_unpicklable, "rank 0")],
)
def test_a_failed_rank_fails_the_call_and_the_next_call_works(fn, text):
    with pytest.raises(RankFailure, match=text):
        run_ranks(2, fn, timeout=30)
    assert [total for _, total, _ in run_ranks(2, _sum_of_ranks, 0)] == [1.0, 1.0]


def test_a_failure_has_the_stderr_of_its_call():
    with pytest.raises(RankFailure) as first:
        run_ranks(2, _complain_and_raise)
    assert all(f"a library's words on rank {rank}" in str(first.value) for rank in range(2))
    run_ranks(2, _sum_of_ranks, 0)
    with pytest.raises(RankFailure) as second:
        run_ranks(2, _raise_on_rank_one, timeout=30)
    assert "a library's words" not in str(second.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL has a GPU here")
def test_nccl_without_a_gpu_fails_the_call():
    with pytest.raises(RankFailure, match="set_device"):
        run_ranks(2, _sum_of_ranks, 0, backend="nccl", bound=True)
    assert [total for _, total, _ in run_ranks(2, _sum_of_ranks, 0)] == [1.0, 1.0]


def test_ranks_that_hang_are_ended_and_their_stacks_shown():
    run_ranks(2, _sum_of_ranks, 0)
    with pytest.raises(RankFailure, match="_wait_for_ever"):
        run_ranks(2, _wait_for_ever, timeout=1)


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it, and collects the first alone. It shows only where both are collected."""
    files = Path(__file__).parents[1].rglob("test_*.py")
    names = [file.name for file in files if not (file.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))
