"""Stores by themselves on the simulated GPU: memory that is given back, and taken anew, while copies are under way.

Whole trainings with stores are among the order programs, of which ``make race-check`` runs all.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from simulated_gpu.worker import Call
from torch import Tensor

NUMEL = 512
PAGE = NUMEL * 4  # bytes


def _store(budget: float = 0, room: Any = None) -> Any:
    from zero_optim.stores.host_homes import HostHomes
    from zero_optim.stores.host_memory import HostMemory
    from zero_optim.stores.lanes import make_lanes
    from zero_optim.stores.paged_store import PagedStore

    device = torch.device("cuda", 0)
    return PagedStore(device, make_lanes(device), HostHomes(HostMemory(pinned=True)), budget, room)


def _page(value: float) -> dict[str, Tensor]:
    return {"exp_avg": torch.full((NUMEL,), value, device="cuda")}


def pages_in_turn(steps: int, room: int | None) -> list[list[float]]:
    """As a step goes through them. ``room``: for so many, after the second step."""
    store = _store(0, None if room is None else lambda: room * PAGE)
    pages = [store.allocate(_page(value)) for value in range(5)]
    for _ in range(steps):
        store.prefetch(pages[0])
        for place, number in enumerate(pages):
            for later in pages[place + 1 : place + 2]:
                store.prefetch(later)
            store.fetch(number)["exp_avg"].mul_(2).add_(1)
            store.commit(number)
        store.end_step()
    values = []
    for number in pages:
        state = store.fetch(number)["exp_avg"]
        values.append([float(state[at].cpu()) for at in (0, -1)])
        store.discard(number)
    torch.cuda.synchronize()
    store.close()
    return values


@pytest.mark.parametrize("room", (None, 0, 2, 5))
def test_pages_in_turn(call: Call, room: int | None) -> None:
    want = [[value * 2**4 + 15] * 2 for value in range(5)]
    assert call(pages_in_turn, 4, room) == (want, [])


def closed_under_way(kept: bool, written: bool) -> list[int]:
    """The memory of the slots, and of the homes, goes while the lanes have work."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        store = _store(math.inf if kept else 0)
        pages = [store.allocate(_page(value)) for value in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    for number in pages:
        store.prefetch(number)
        state = store.fetch(number)["exp_avg"]
        if written:
            state.add_(1)
            store.commit(number)
        else:
            state.sum()
            store.discard(number)
    store.close()
    footprint = store.footprint()
    del store
    gc.collect()
    torch.cuda.synchronize()
    return [*footprint.values()]


@pytest.mark.parametrize("written", (False, True))
@pytest.mark.parametrize("kept", (False, True))
def test_a_store_is_closed_while_copies_are_under_way(call: Call, kept: bool, written: bool) -> None:
    assert call(closed_under_way, kept, written) == ([0, 0, 0], [])
