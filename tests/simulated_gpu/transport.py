"""NCCL on the simulated device: a transport whose collectives run on a stream of their group.

A collective is launched after what the current stream had before it, and arrives as late as possible: its outputs are
NaN until ``wait``, which makes the current stream wait for the collective's stream. gloo carries the data, and the host
waits for it. A program's use of the collective's memory on a stream that has not waited is a race, which the device
reports.

The transport also records the order of issue over all process groups, for ``different_order``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode_temporarily
from zero_optim.comm.handle import Handle, Work
from zero_optim.comm.transport import Reduction, Transport

from . import device, torch_cuda
from .switch import Entry

Group = dist.ProcessGroup | None
NOT_THERE = 0x55
"""What integers hold until a collective arrives: they have no NaN, and no test expects this value."""


@dataclass(frozen=True)
class Collective:
    """A collective, as one rank issues it.

    Attributes:
        kind: its name in reports.
        group: None is the default group.
        sent: this rank's contribution. gloo carries it to all ranks.
        reads, writes: memory that the collective may use until somebody has waited for it.
        finish: given every rank's ``sent``, in rank order, returns pairs of a tensor in ``writes`` and its new value.
    """

    kind: str
    group: Group
    sent: Tensor
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    finish: Callable[[Sequence[Tensor]], Sequence[tuple[Tensor, Tensor]]]


class LateTransport(Transport):
    """See the module.

    Attributes:
        issued: what this rank has issued so far, over all groups.
        queues: collectives that nobody has waited for, in the order of issue, by the group's name.
    """

    def __init__(self) -> None:
        self.issued: list[Entry] = []
        self.queues: dict[str, list[LateWork]] = {}
        self._streams: dict[str, torch_cuda.Stream] = {}  # by the group's name

    def _issue(self, collective: Collective, numel: int | None = None) -> Work:
        """``numel``: see ``Entry``; None: as many as it sends."""
        group = self._record(collective.kind, collective.group, collective.sent.numel() if numel is None else numel)
        name = group.group_name
        if name not in self._streams:
            self._streams[name] = torch_cuda.Stream.of(device.call("new_stream"))
        queue = self.queues.setdefault(name, [])
        queue.append(LateWork(collective, queue, self._streams[name]))
        return queue[-1]

    def _record(self, kind: str, group: Group, numel: int = 0) -> dist.ProcessGroup:
        group = group or dist.group.WORLD
        assert group is not None
        ranks = tuple(dist.get_process_group_ranks(group))
        self.issued.append(Entry(ranks, group.group_name, kind, numel))
        return group

    def reduce_scatter(self, reduction: Reduction, group: Group, lend: Callable[[int], Tensor]) -> Handle:
        full, own, into = reduction.full, reduction.own, reduction.received()
        ranks, this = dist.get_world_size(group), dist.get_rank(group)
        if into.data_ptr() == own.data_ptr():  # in place: it is written, and the rest is read
            reads = [full.narrow(0, 0, this * own.numel())]
            reads.append(full.narrow(0, (this + 1) * own.numel(), (ranks - 1 - this) * own.numel()))
        else:
            reads = [full]

        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            return [(into, _sum([part.view(ranks, -1)[this] for part in parts]))]

        work = self._issue(Collective("reduce_scatter", group, full, reads, [into], finish))
        return Handle(work, reduction.on_arrival())

    def all_gather(self, full: Tensor, own: Tensor, group: Group) -> Handle:
        places = list(full.chunk(dist.get_world_size(group)))
        written = [rank for rank, place in enumerate(places) if place.data_ptr() != own.data_ptr()]  # else it is there
        writes = [places[rank] for rank in written]

        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            return [(places[rank], parts[rank]) for rank in written]

        return Handle(self._issue(Collective("all_gather", group, own, [own], writes, finish)))

    def all_reduce(self, tensor: Tensor, group: Group, *, maximum: bool = False) -> Handle:
        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            return [(tensor, torch.stack(list(parts)).amax(0) if maximum else _sum(parts))]

        return Handle(self._issue(Collective("all_reduce", group, tensor, [], [tensor], finish)))

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Tensor, of_each: Sequence[int], group: Group
    ) -> Handle:
        """gloo carries to all ranks what each sends, padded to the longest."""
        this = dist.get_rank(group)
        with _unwatched():
            own = memory_of(sent)
            by_rank = [torch.empty(len(counts), dtype=torch.int64, device="cpu") for _ in counts]
            dist.all_gather(by_rank, torch.tensor([*counts], device="cpu"), group=group)
            carried = own.new_zeros(max(int(of_rank.sum()) for of_rank in by_rank))
            carried[: own.numel()] = own

        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            cut = [part[: int(of.sum())].split(of.tolist()) for part, of in zip(parts, by_rank, strict=True)]
            return [(received, torch.cat([of_rank[this] for of_rank in cut]))]

        return Handle(self._issue(Collective("all_to_all", group, carried, [sent], [received], finish), numel=0))

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        sends = dist.get_rank(group) == 0
        reads, writes = ([tensor], []) if sends else ([], [tensor])

        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            return [] if sends else [(tensor, parts[0])]

        self._issue(Collective("broadcast", group, tensor, reads, writes, finish)).wait()

    def barrier(self, group: Group) -> Handle:
        self._record("barrier", group)
        return super().barrier(group)

    def gather_objects(self, value: object, group: Group) -> list[Any]:
        self._record("gather_objects", group)
        return super().gather_objects(value, group)

    def split(self, group: dist.ProcessGroup, parts: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup:
        self._record("split", group)
        return super().split(group, parts, purpose)


class LateWork:
    """A collective on ``stream``. It holds its tensors until its result is there, as torch holds those of NCCL's."""

    def __init__(self, collective: Collective, queue: list[LateWork], stream: torch_cuda.Stream) -> None:
        stream.wait_stream(torch_cuda.current_stream(torch_cuda.DEVICE))
        device.call("launch", stream.stream_id)
        for tensors, write in ((collective.reads, False), (collective.writes, True)):
            for tensor in tensors:
                device.call("touch", tensor.detach(), write, stream.stream_id, collective.kind)
        self._collective, self._queue, self._done = collective, queue, stream.record_event()
        with _unwatched():
            sent = memory_of(collective.sent).clone()
            self._parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(collective.group))]
            self._gloo: Any = dist.all_gather(self._parts, sent, group=collective.group, async_op=True)
            for tensor in collective.writes:
                memory_of(tensor).fill_(torch.nan if tensor.is_floating_point() else NOT_THERE)

    def wait(self, timeout: object = None) -> bool:
        torch_cuda.current_stream(torch_cuda.DEVICE).wait_event(self._done)
        while self in self._queue:  # the collectives of a group arrive in order
            self._queue[0]._arrive()
        return True

    def is_completed(self) -> bool:
        raise AssertionError(
            "the library asks whether a collective has arrived: what a rank launches must not depend on that"
        )

    def _arrive(self) -> None:
        self._gloo.wait()
        self._queue.remove(self)
        with _unwatched():
            for tensor, value in self._collective.finish(self._parts):
                memory_of(tensor).copy_(value)
        del self._collective, self._parts, self._gloo


def memory_of(tensor: Tensor) -> Tensor:
    """The same memory, as a CPU tensor without autograd. The device does not see what is done with it."""
    return device.call("alias", tensor.detach()) if tensor.is_cuda else tensor.detach()


@contextmanager
def _unwatched() -> Iterator[None]:
    """The simulation's own operators run outside the modes of ``watching``, which look at the program's. They would
    take a quarter of the processor time."""
    watched = torch._C._len_torch_dispatch_stack() > 0
    with _pop_mode_temporarily() if watched else nullcontext(), torch._C.DisableTorchFunction():
        yield


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In fp32, in rank order, rounded once, as gloo's path does it, so that both give the same bits."""
    if not parts[0].is_floating_point():
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)
