"""What is a race under ``held``, what is none, and how two orders of collectives are told apart."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping

import pytest
import torch
from harness import RankFailure, run_ranks
from torch import Tensor
from zero_optim.comm.transport import Reduction

from simulated_gpu.held import HeldTransport
from simulated_gpu.transport import Entry, RaceFound, different_order

RACES: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "an output is read": lambda full, out: out.sum(),
    "an output is written": lambda full, out: out.add_(1),
    "a part of an output is written": lambda full, out: out[1:].zero_(),
    "an input is written": lambda full, out: full.zero_(),
    "an input is written past torch": lambda full, out: ctypes.memset(full.data_ptr(), 1, 4),
    "an output's memory is taken": lambda full, out: out.untyped_storage().resize_(0),
    "an exception is caught": lambda full, out: _caught(out),
}
NO_RACES: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "an input is read": lambda full, out: full.sum(),
    "other memory is used": lambda full, out: torch.ones(3).add_(1),
    "a view of an output is made": lambda full, out: out[1:],
    "the like of an output is made": lambda full, out: torch.empty_like(out),
}


def _caught(out: Tensor) -> None:
    with contextlib.suppress(RaceFound):
        out.sum()


def _is_race(rank: int, use: Callable[[Tensor, Tensor], object], *, waits: bool) -> bool:
    transport = HeldTransport()
    full, out = torch.arange(4.0), torch.zeros(2)
    try:
        with transport.watching():
            reduction = Reduction(full, full.chunk(2)[rank], out, accumulate=False)
            work = transport.reduce_scatter(reduction, None, torch.empty).work
            if waits:
                work.wait()
                assert out.tolist() == [4.0 * rank, 4.0 * rank + 2]
            use(full, out)
            work.wait()
    except RaceFound:
        return True
    return False


def _seen(rank: int, world_size: int, waits: bool) -> dict[str, bool]:
    return {name: _is_race(rank, use, waits=waits) for name, use in {**RACES, **NO_RACES}.items()}


def test_uses_before_a_wait():
    assert run_ranks(2, _seen, False) == [dict.fromkeys(RACES, True) | dict.fromkeys(NO_RACES, False)] * 2


def test_uses_after_it():
    assert run_ranks(2, _seen, True) == [dict.fromkeys([*RACES, *NO_RACES], False)] * 2


def _asked(rank: int, world_size: int) -> None:
    HeldTransport().all_reduce(torch.ones(1), None).work.is_completed()


def test_nobody_may_ask_whether_a_collective_has_arrived():
    with pytest.raises(RankFailure, match="the library asks whether a collective has arrived"):
        run_ranks(2, _asked)


def test_ranks_in_different_orders_are_told():
    a, b = Entry((0, 1), "g", "all_reduce", 4), Entry((0, 1), "h", "all_gather", 4)
    alone = Entry((0,), "i", "all_gather", 4)
    assert different_order([[a, alone, b], [a, b]]) == ""
    assert different_order([[a, b], [b, a]]).startswith("collective 0: rank 0 issues Entry(ranks=(0, 1), group='g'")
    assert different_order([[a, b], [a]]) == "rank 0 issues 2 collectives, rank 1 1"
