"""Copies that take effect as late as they may change nothing; each wait that is left out shows, or has a reason."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory

import pytest
import torch
from cells import slow, slow_where
from harness import run_ranks

from stores.deferred import Waits, deferring, waits_of_the_stores
from stores.trajectories import Store, Training, Trajectory, difference, trajectory

SMALL = {"bucket_cap_mb": 0.002}
PAGED = Store({"state_offload": "paged", "device_budget": 0})
ON_HOST = {"param_offload": "cpu"}
NVME = Store({"state_offload": "nvme:."})  # each rank in a folder of its own
CPU = Store({"state_offload": "cpu", "speculate": False})
GUESSED = Store({"state_offload": "cpu"})
TRAININGS: Sequence[tuple[Training, Sequence[Store]]] = (
    (Training(2, torch.float32, micro=2, options=SMALL), (PAGED, NVME, CPU)),
    (Training(1, torch.bfloat16, micro=2, no_sync=True, options=SMALL), (PAGED, NVME, CPU)),
    (Training(0, torch.float16, scaled=True, options=SMALL), (PAGED, NVME, CPU)),
    (
        Training(3, torch.bfloat16, micro=2),
        (PAGED, CPU, *(Store(s.options, ON_HOST) for s in (PAGED, NVME, CPU, Store()))),
    ),
    (Training(2, torch.bfloat16, options=SMALL), (GUESSED,)),
    (Training(3, torch.bfloat16, micro=2), (GUESSED, Store(GUESSED.options, ON_HOST))),
)
FEW = (1, 3)  # of TRAININGS: they call all that is called on one rank
GUESSING = (4, 5)  # and on two, where updates are made before the norm is known
_COMPUTED = "What computes has computed, so that no copy comes too early. make race-check runs stores where it is late"
_CAME_BEFORE = "Whoever reads has waited for its arrival before"
UNSEEN: dict[str, str] = {
    "paged_store.allocate: made.left.set()": _COMPUTED,
    "paged_store.commit: page.used.set()": _COMPUTED,
    "paged_store.commit: lane.after(page.used)": _COMPUTED,
    "paged_store.discard: page.used.set()": _COMPUTED,
    "paged_store._fit_frames: frame.free.set()": _COMPUTED,
    "workplace._take_from_current: self._now.set()": _COMPUTED,
    "workplace._take_from_current: self._store.lanes.to_host.after(self._now)": _COMPUTED,
    "workplace._bring_parameters: self._now.set()": _COMPUTED,
    "workplace._bring_parameters: lane.after(self._now)": _COMPUTED,
    "workplace.updated: self._now.set()": _COMPUTED,
    "workplace.updated: lanes.to_device.after(self._now)": _COMPUTED,
    "paged_store.release: page.arrived.wait()": _CAME_BEFORE,
    "paged_store.wait_for_visitors: page.arrived.wait()": _CAME_BEFORE,
    "paged_store.release: page.left.wait()": "A training reads all state at its end, when every page has left",
    "paged_store._send_back: page.arrived.wait()": "No training wants the frame of a page that is on its way in",
    "paged_store.drop_frames: self._lanes.keep(frame.run)": "Copies that are not made keep their tensors",
    "paged_store._let_stay: page.left.wait()": "On a CPU nobody asks for room",
    "paged_store.wait: page.left.wait()": "It is for who measures: no training calls it",
    "disk_homes.unchanged: mark.wait()": "On a CPU who reads a page has waited for its copy",
    "speculation.drop: guess.over.result()": "As late as that nobody reads what it writes, or it is written anew",
    "workplace.release: mark.wait()": "A step has waited for all, and nothing is released between backward and step",
    "workplace.after_taking: self._taken.order_current()": "What is written after it was taken is taken anew",
    "workplace._bring_parameters: self._sent.wait()": "Who sends waits at once, as a gather follows",
    "workplace.parameters_to_guess: self._sent.wait()": "No update is guessed here",
    "workplace.parameters: self._sent.wait()": "Who sends waits at once, as a gather follows",
}
"""Waits that may be left out here, each with the reason."""


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


def _deferred(rank: int, world_size: int, number: int, left_out: str = "") -> tuple[list[str], set[str]]:
    """What differs from a training without a store, and the waits that were called."""
    training, stores = TRAININGS[number]
    want, waits, found = _plain(rank, world_size, number), Waits(left_out), []
    for store in stores:
        with deferring(waits), TemporaryDirectory() as folder, working_in(folder):
            if text := difference(want, trajectory(rank, world_size, training, store)):
                found.append(f"{store.name}: {text}")
    return found, waits.called


# On one rank FEW go on below until something shows.
@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        pytest.param(ranks, number, marks=() if ranks == 2 - number % 2 or number in (3, 5) else slow)
        for ranks in (1, 2)
        for number in range(len(TRAININGS))
    ],
)
def test_late_copies_change_nothing(ranks: int, number: int) -> None:
    for found, called in run_ranks(ranks, _deferred, number):
        assert not found
        assert called


def _without(rank: int, world_size: int, wait: str, numbers: Sequence[int]) -> str:
    """What shows that a wait was left out; empty: nothing."""
    for number in numbers:
        try:
            found, _ = _deferred(rank, world_size, number, wait)
        except Exception as error:
            return repr(error)
        if found:
            return found[0]
    return ""


# One that may be left out tells of UNSEEN, and not of the stores.
@pytest.mark.parametrize("wait", slow_where(UNSEEN.__contains__, waits_of_the_stores()))
def test_a_wait_that_is_left_out_shows(wait: str) -> None:
    shown = run_ranks(2, _without, wait, GUESSING) if "speculation" in wait else run_ranks(1, _without, wait, FEW)
    assert any(shown) == (wait not in UNSEEN), shown


def test_reasons_are_for_waits_that_are_there() -> None:
    waits = waits_of_the_stores()
    assert set(UNSEEN) <= set(waits) and len(set(waits)) == len(waits)
