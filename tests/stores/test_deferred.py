"""Copies that take effect as late as their marks allow change nothing."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory

import pytest
import torch
from cells import slow
from harness import run_ranks

from stores.deferred import deferring
from stores.trajectories import Store, Training, Trajectory, difference, trajectory

SMALL = {"bucket_cap_mb": 0.002}
PAGED = Store({"state_offload": "paged", "device_budget": 0})
ON_HOST = {"param_offload": "cpu"}
NVME = Store({"state_offload": "nvme:."})  # each rank in a folder of its own
CPU = Store({"state_offload": "cpu", "speculate": False})
TRAININGS: Sequence[tuple[Training, Sequence[Store]]] = (
    (Training(2, torch.float32, micro=2, options=SMALL), (PAGED, NVME, CPU)),
    (Training(1, torch.bfloat16, micro=2, no_sync=True, options=SMALL), (PAGED, NVME, CPU)),
    (Training(0, torch.float16, scaled=True, options=SMALL), (PAGED, NVME, CPU)),
    (
        Training(3, torch.bfloat16, micro=2),
        (PAGED, CPU, *(Store(s.options, ON_HOST) for s in (PAGED, NVME, CPU, Store()))),
    ),
)


@functools.lru_cache(maxsize=16)
def _plain(rank: int, world_size: int, number: int) -> Trajectory:
    return trajectory(rank, world_size, TRAININGS[number][0], Store())


@contextlib.contextmanager
def working_in(folder: str) -> Iterator[None]:
    """``contextlib.chdir``, which Python 3.10 does not have."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _deferred(rank: int, world_size: int, number: int) -> list[str]:
    """What differs from a training without a store."""
    training, stores = TRAININGS[number]
    want, found = _plain(rank, world_size, number), []
    for store in stores:
        with deferring(), TemporaryDirectory() as folder, working_in(folder):
            if text := difference(want, trajectory(rank, world_size, training, store)):
                found.append(f"{store.name}: {text}")
    return found


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        pytest.param(ranks, number, marks=() if ranks == 2 - number % 2 or number == 3 else slow)
        for ranks in (1, 2)
        for number in range(len(TRAININGS))
    ],
)
def test_late_copies_change_nothing(ranks: int, number: int) -> None:
    assert run_ranks(ranks, _deferred, number) == [[]] * ranks
