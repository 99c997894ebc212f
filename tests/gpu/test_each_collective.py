"""Every collective of `comm`, on one NCCL rank, and on two where they can share a GPU. An optimizer of one rank
communicates nothing, so here they are called as such: whether NCCL takes the tensors, the streams and the groups that
the package gives it. On a CPU there are two ranks over gloo, which is never asked to communicate on one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import on_nccl_ranks
from places import ON_GPU
from torch import Tensor

pytestmark = pytest.mark.gpu

NUMEL = 4099  # no whole rows
LARGE = 2**24 if ON_GPU else 2**12
WORLD_SIZES = [1, pytest.param(2, marks=pytest.mark.ranks)] if ON_GPU else [2]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OF_TRANSPORT = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather_objects",
    "host_group",
    "reduce_scatter",
    "split",
)


class _Noting:
    """A transport, and which of its methods were called."""

    def __init__(self, transport: Any) -> None:
        self._transport, self.called = transport, set[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            return found(*args, **kwargs)

        return call


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


def _arrived(issued: Any) -> None:
    issued.wait()


def _own(full: Tensor, group: Any) -> Tensor:
    return full.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _reduced(transport: Any, group: Any, numel: int, dtype: torch.dtype) -> None:
    """In place, into other memory, and added to it."""
    from zero_optim.comm.transport import Reduction

    total = 3.0 * dist.get_world_size(group)
    for elsewhere, accumulate in ((False, False), (True, False), (True, True)):
        full = torch.full((numel,), 3.0, dtype=dtype, device=_device())
        own = _own(full, group)
        out = torch.full_like(own, 2.0) if elsewhere else own
        _arrived(transport.reduce_scatter(Reduction(full, own, out, accumulate), group, full.new_empty))
        _expect(out, total + 2.0 * accumulate)


def _exchanged(transport: Any, group: Any, numel: int, dtype: torch.dtype) -> None:
    """Rank r gets r more from each than rank 0 does, and rank 0 nothing if ``numel`` is 0."""
    ranks, this = dist.get_world_size(group), dist.get_rank(group)
    sent = torch.cat(
        [torch.full((numel + rank,), float(ranks * this + rank), dtype=dtype) for rank in range(ranks)]
    ).to(_device())
    received = sent.new_full(((numel + this) * ranks,), torch.nan)
    counts = [numel + rank for rank in range(ranks)]
    _arrived(transport.all_to_all(sent, counts, received, [numel + this] * ranks, group))
    for rank, part in enumerate(received.chunk(ranks) if len(received) else ()):
        _expect(part, float(ranks * rank + this))


def _gathered(transport: Any, group: Any, numel: int, dtype: torch.dtype) -> None:
    full = torch.full((numel,), torch.nan, dtype=dtype, device=_device())
    for own in (torch.empty_like(_own(full, group)), _own(full, group)):  # stage 3's is in other memory
        _arrived(transport.all_gather(full.fill_(torch.nan), own.fill_(7.0), group))
        _expect(full, 7.0)
    transport.broadcast(full, group)
    transport.broadcast(full.view(torch.uint8), group)
    _arrived(transport.all_reduce(full, group, maximum=True))
    _expect(full, 7.0)
    _arrived(transport.all_reduce(full, group))
    _expect(full, 7.0 * dist.get_world_size(group))


def _expect(tensor: Tensor, value: float) -> None:
    assert torch.equal(tensor.cpu(), torch.full(tensor.shape, value, dtype=tensor.dtype)), (tensor, value)


def _every_collective(rank: int, world_size: int, dtype: torch.dtype) -> list[str]:
    """The methods of the transport that were called."""
    from zero_optim.comm.collectives import Comm

    group: Any = dist.group.WORLD
    transport = _Noting(Comm(group, _device())._transport(_device()))
    for numel in (world_size, NUMEL * world_size, LARGE):
        _reduced(transport, group, numel, dtype)
        _gathered(transport, group, numel, dtype)
        _exchanged(transport, group, numel, dtype)
    _exchanged(transport, group, 0, dtype)
    _arrived(transport.barrier(group))
    world = [*range(world_size)]
    assert transport.gather_objects({"rank": rank}, group) == [{"rank": other} for other in world]
    again = transport.split(group, [world], "again")
    assert transport.gather_objects("over a new group", again) == ["over a new group"] * world_size
    _reduced(transport, again, NUMEL * world_size, dtype)
    assert dist.get_backend(transport.host_group(group)) == "gloo"
    return sorted(transport.called)


@pytest.mark.parametrize("bound", [False, True], ids=["", "bound"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_collective(world_size: int, dtype: torch.dtype, bound: bool) -> None:
    """`bound`: `init_process_group(device_id=...)`, by which groups are split from each other."""
    for called in on_nccl_ranks(world_size, _every_collective, dtype, bound=bound):
        assert called == sorted(OF_TRANSPORT)


def test_all_of_them_are_called() -> None:
    from zero_optim.comm.transport import Transport

    methods = {name for name in vars(Transport) if name[0] != "_" and callable(getattr(Transport, name))}
    assert methods == {*OF_TRANSPORT}


def _on_streams(rank: int, world_size: int) -> None:
    """Issued on one stream and waited for on another, with work before and behind. On a CPU one after the other."""
    from zero_optim.comm.collectives import Comm

    comm = Comm(dist.group.WORLD, _device())
    fulls = [torch.zeros(LARGE, device=_device()) for _ in range(3)]
    for step in range(5):
        for full in fulls:
            full.fill_(step)
        own = _own(fulls[2], None)
        pendings = [comm.all_reduce(fulls[0]), comm.all_gather(fulls[1])]
        pendings.append(comm.reduce_scatter(fulls[2], own, own.new_empty, accumulate=False))
        wanted = [step * world_size, step, step * world_size]
        side = torch.cuda.Stream() if ON_GPU else None
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            for pending in pendings:
                assert pending.order_current() == ON_GPU
                pending.wait()
            for full in fulls:
                full.mul_(2)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        for got, value in zip((*fulls[:2], own), wanted, strict=True):
            _expect(got, 2.0 * value)
    assert {kind: of["calls"] for kind, of in comm.stats().items()} == dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter"), 5
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_waits_on_another_stream(world_size: int) -> None:
    on_nccl_ranks(world_size, _on_streams)
