"""The simulation by itself: it reports a missing wait in a small program, and nothing where the wait is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankFailure, on_one_gpu, run_ranks
from torch import Tensor, nn

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
        assert "aten::sum on stream 2 reads what aten::fill_ on stream 1 wrote (1 times)" in found, wait
        assert " in _read_on" in found and " in read_elsewhere" in found


def write_after_read(waits: bool) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x = _written_on(a)
    b.wait_stream(a)
    _read_on(b, x)
    a.wait_stream(b if waits else torch.cuda.current_stream())
    with torch.cuda.stream(a):
        x.zero_()
    torch.cuda.synchronize()


def free_in_use(excused: bool) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x = _written_on(a)
    b.wait_stream(a)
    _read_on(b, x)
    if excused:
        x.record_stream(b)
    x.untyped_storage().resize_(0)
    torch.cuda.synchronize()


def new_memory_elsewhere(waits: bool) -> None:
    torch.ones(4, device="cuda")  # freed, and given to the next
    a, x = torch.cuda.Stream(), torch.empty(4, device="cuda")
    if waits:
        assert x.isnan().all()  # the host waits
    with torch.cuda.stream(a):
        x.fill_(1)
    torch.cuda.synchronize()


def overwritten_by_the_host(waits: bool) -> None:
    host = torch.ones(4, device="cpu").pin_memory()
    torch.empty(4, device="cuda").copy_(host, non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    host.zero_()
    torch.cuda.synchronize()


def read_in_a_hook(waits: bool) -> None:
    """Hooks keep the AccumulateGrad nodes on the stream on which they were made; backward runs on another."""
    weights = [nn.Parameter(torch.ones(3, 3, device="cuda")) for _ in range(2)]
    nodes = [torch.autograd.graph.get_gradient_edge(weight).node for weight in weights]
    side, default = torch.cuda.Stream(), torch.cuda.default_stream()
    side.wait_stream(default)

    def hook(_: Tensor) -> None:
        if waits:
            torch.cuda.current_stream().wait_stream(default)
        weights[1].grad.sum()

    with torch.cuda.stream(side):
        for _ in range(2):
            hidden = torch.ones(2, 3, device="cuda") @ weights[0]
            hidden.register_hook(hook)
            (hidden @ weights[1]).sum().backward()
    torch.cuda.synchronize()
    del nodes


RACES = {
    write_after_read: "aten::zero_ on stream 1 writes what aten::sum on stream 2 read",
    free_in_use: "memory allocated on stream 1 is freed, and may be used again there, while aten::sum on stream 2",
    new_memory_elsewhere: "aten::fill_ on stream 1 writes memory allocated on the default stream",
    overwritten_by_the_host: "the host (aten::zero_(self)) writes what aten::copy_ on the default stream read",
    read_in_a_hook: "reads what aten::add_ of torch::autograd::AccumulateGrad on the default stream wrote",
}


@pytest.mark.parametrize("body", RACES, ids=lambda body: body.__name__)
def test_a_race_is_found_only_without_the_wait(body: Callable[[bool], None]) -> None:
    assert RACES[body] in _found(body, False)
    assert not _found(body, True)


def _collective(rank: int, world_size: int, use: str, waits: bool) -> list[float]:
    from zero_optim.comm import transport

    full, out = torch.arange(4.0), torch.zeros(2)
    reduction = transport.Reduction(full, full.chunk(2)[rank], out, accumulate=False)
    work = transport.used().reduce_scatter(reduction, None, torch.empty).work
    if waits:
        work.wait()
    {"read": out.sum, "write": full.zero_, "ask": work.is_completed}[use]()
    work.wait()
    return out.tolist()


@pytest.mark.parametrize("use", ["read", "write"])
def test_a_collective_is_waited_for(use: str) -> None:
    with pytest.raises(RankFailure, match="RaceFound: .*reduce_scatter on stream 129"):
        run_ranks(2, _collective, use, False, simulated=LATE)
    assert run_ranks(2, _collective, use, True, simulated=LATE) == [[0.0, 2.0], [4.0, 6.0]]


def test_nobody_asks_whether_a_collective_has_arrived() -> None:
    with pytest.raises(RankFailure, match="the library asks whether a collective has arrived"):
        run_ranks(2, _collective, "ask", True, simulated=LATE)


def _in_another_order(rank: int, world_size: int) -> None:
    from zero_optim.comm import transport

    other = torch.distributed.new_group([0, 1])
    groups = [None, other][:: 1 - 2 * rank]
    for work in [transport.used().all_reduce(torch.ones(1), group).work for group in groups]:
        work.wait()


def test_ranks_issue_collectives_in_one_order() -> None:
    with pytest.raises(RankFailure, match="rank 0 issues Entry.*, rank 1 Entry"):
        run_ranks(2, _in_another_order, simulated=LATE)
