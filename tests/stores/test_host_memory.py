"""Slabs of host memory: random takes and gives against a list of what is taken."""

from __future__ import annotations

import random

import torch
from zero_optim.stores import host_memory
from zero_optim.stores.host_memory import ALIGNMENT, HostMemory


def test_runs_never_overlap_and_keep_what_is_written(monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 8 * ALIGNMENT)
    memory, draw = HostMemory(pinned=False), random.Random(0)
    taken: list[tuple[torch.Tensor, int]] = []
    for number in range(2000):
        if taken and draw.random() < 0.5:
            run, mark = taken.pop(draw.randrange(len(taken)))
            assert bool((run == mark).all())
            memory.give_back(run)
        else:
            run = memory.take(draw.choice((0, 1, 100, ALIGNMENT, 3 * ALIGNMENT + 5, 20 * ALIGNMENT)))
            assert run.data_ptr() % ALIGNMENT == 0
            run.fill_(number % 251)
            taken.append((run, number % 251))
        assert memory.in_use == sum(run.nbytes for run, _ in taken)


def test_memory_that_was_all_given_back_is_taken_again() -> None:
    memory = HostMemory(pinned=False)
    first = [memory.take(10_000) for _ in range(5)]
    addresses = {run.data_ptr() for run in first}
    for run in first:
        memory.give_back(run)
    assert {memory.take(10_000).data_ptr() for _ in range(5)} == addresses
