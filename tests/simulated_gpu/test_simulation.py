"""The simulation by itself: it reports a missing wait in a small program, and nothing where the wait is there.

What else it must report has a seeded fault, see ``faults.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankFailure, on_one_gpu, run_ranks
from torch import Tensor

from simulated_gpu.switch import LATE


def _found(body: Callable[..., Any], *args: Any) -> str:
    """The races of ``body``; empty: none."""
    try:
        on_one_gpu(body, *args)
    except RankFailure as failure:
        assert "RaceFound: " in str(failure), failure
        return str(failure)
    return ""


def _written_on(stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.empty(4, device="cuda").fill_(1)


def _read_on(stream: torch.cuda.Stream, tensor: Tensor) -> None:
    with torch.cuda.stream(stream):
        tensor.sum()


WAITS: dict[str, Callable[[Any, Any, Tensor], object]] = {
    "wait_stream": lambda a, b, x: b.wait_stream(a),
    "event.synchronize": lambda a, b, x: a.record_event().synchronize(),
    "item": lambda a, b, x: (torch.cuda.current_stream().wait_stream(a), x[0].item()),
}
NO_WAITS: dict[str, Callable[[Any, Any, Tensor], object]] = {
    "nothing": lambda a, b, x: None,
    "a query, to which everything is late": lambda a, b, x: a.record_event().query(),
    "the other way round": lambda a, b, x: a.wait_stream(b),
    "another stream": lambda a, b, x: b.wait_stream(torch.cuda.current_stream()),
}


def read_elsewhere(wait: str) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x = _written_on(a)
    {**WAITS, **NO_WAITS}[wait](a, b, x)
    _read_on(b, x)
    torch.cuda.synchronize()


def test_a_read_that_waits_for_the_write_is_no_race() -> None:
    for wait in WAITS:
        assert not _found(read_elsewhere, wait), wait


def test_a_read_that_does_not_wait_for_the_write_is_a_race() -> None:
    for wait in NO_WAITS:
        found = _found(read_elsewhere, wait)
        assert re.search(r"aten::sum on stream \d+ reads what aten::fill_ on stream \d+ wrote \(1 times\)", found), wait
        assert " in _read_on" in found and " in read_elsewhere" in found


def _asks_for_a_collective(rank: int, world_size: int) -> None:
    from zero_optim.comm import transport

    work = transport.used().all_reduce(torch.ones(1), None)._work
    work.is_completed()


def test_nobody_asks_whether_a_collective_has_arrived() -> None:
    with pytest.raises(RankFailure, match="the library asks whether a collective has arrived"):
        run_ranks(2, _asks_for_a_collective, simulated=LATE)


def _in_another_order(rank: int, world_size: int) -> None:
    from zero_optim.comm import transport

    other = torch.distributed.new_group([0, 1])
    groups = [None, other][:: 1 - 2 * rank]
    for handle in [transport.used().all_reduce(torch.ones(1), group) for group in groups]:
        handle.wait()


def test_ranks_issue_collectives_in_one_order() -> None:
    with pytest.raises(RankFailure, match="rank 0 issues Entry.*, rank 1 Entry"):
        run_ranks(2, _in_another_order, simulated=LATE)
