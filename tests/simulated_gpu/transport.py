"""What both simulations of NCCL share: the data of each collective, over gloo, and the order in which they are issued.

A collective reads its inputs and writes its outputs at an unknown time between its issue and its ``wait``. Which memory
that is, and what is in it afterwards, is said here. What becomes of programs that touch it in between is up to the two:
``held`` and ``streams``. The order is that of the library's collectives: a program's own are not in it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from zero_optim.comm.transport import Issued, Reduction, StreamTransport, Work

Group = dist.ProcessGroup | None
NOT_THERE = 0x55
"""What integers hold until a collective has arrived, which have no NaN: a value that no test expects."""


class RaceFound(AssertionError):
    """A program uses memory in no order with a collective, or with another stream."""


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


@dataclass(frozen=True)
class Entry:
    """A collective in the order of issue.

    Attributes:
        ranks: of its group, as the whole job numbers them.
        group: torch's name of the group.
        numel: elements that this rank sends; 0 where it sends objects, or nothing, or where others send another number.
    """

    ranks: tuple[int, ...]
    group: str
    kind: str
    numel: int


class SplitHangs(Exception):
    """With NCCL this call would never return: it waits for ranks that do not make it."""


Queue = list["SimulatedWork"]
"""The collectives of one group that nobody has waited for, in the order of issue."""


class SimulatedTransport(StreamTransport, ABC):
    """NCCL, as far as a program can tell.

    Attributes:
        issued: what this rank has issued so far, over all groups.
        queues: what is under way, by the names of the groups.
        device_bound: whether ``init_process_group`` was given a ``device_id``, so that groups split communicators.
    """

    def __init__(self, *, device_bound: bool = False) -> None:
        self.issued: list[Entry] = []
        self.queues: dict[str, Queue] = {}
        self.device_bound = device_bound

    @abstractmethod
    def begin(self, collective: Collective, group: str) -> SimulatedWork:
        """Issue it. ``group``: torch's name of its group."""

    @abstractmethod
    def watching(self) -> AbstractContextManager[None]:
        """The program runs within it. Raises RaceFound at the end, whatever the program has caught."""

    def at_memory(self) -> AbstractContextManager[None]:
        """The simulation itself uses memory within it, and not the program."""
        return nullcontext()

    def memory_of(self, tensor: Tensor) -> Tensor:
        """The same memory, as a CPU tensor without autograd."""
        return tensor.detach()

    def _issue(self, collective: Collective, numel: int | None = None) -> Work:
        """``numel``: see ``Entry``; None: as many as it sends."""
        group = self._record(collective.kind, collective.group, collective.sent.numel() if numel is None else numel)
        queue = self.queues.setdefault(group.group_name, [])
        queue.append(self.begin(collective, group.group_name))
        return queue[-1]

    def _record(self, kind: str, group: Group, numel: int = 0) -> dist.ProcessGroup:
        group = group or dist.group.WORLD
        assert group is not None
        ranks = tuple(dist.get_process_group_ranks(group))
        self.issued.append(Entry(ranks, group.group_name, kind, numel))
        return group

    def reduce_scatter(self, reduction: Reduction, group: Group, lend: Callable[[int], Tensor]) -> Issued:
        full, own, out = reduction.full, reduction.own, reduction.out
        beside = reduction.accumulate or out.dtype != full.dtype
        into = own if beside else out
        ranks, this = dist.get_world_size(group), dist.get_rank(group)
        if into.data_ptr() == own.data_ptr():  # in place: it is written, and the rest is read
            reads = [full.narrow(0, 0, this * own.numel())]
            reads.append(full.narrow(0, (this + 1) * own.numel(), (ranks - 1 - this) * own.numel()))
        else:
            reads = [full]
        collective = Collective(
            "reduce_scatter",
            group,
            full,
            reads,
            [into],
            lambda parts: [(into, _sum([part.view(ranks, -1)[this] for part in parts]))],
        )
        store = out.add_ if reduction.accumulate else out.copy_
        return Issued(self._issue(collective), (lambda: store(own)) if beside else None)

    def all_gather(self, full: Tensor, own: Tensor, group: Group) -> Issued:
        before = dist.get_rank(group) * own.numel()
        after = before + own.numel()
        writes = [full.narrow(0, 0, before), full.narrow(0, after, full.numel() - after)]  # its own part is there

        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            whole = torch.cat(list(parts))
            return [(writes[0], whole[:before]), (writes[1], whole[after:])]

        return Issued(self._issue(Collective("all_gather", group, own, [own], writes, finish)))

    def all_reduce(self, tensor: Tensor, group: Group, *, maximum: bool = False) -> Issued:
        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            return [(tensor, torch.stack(list(parts)).amax(0) if maximum else _sum(parts))]

        return Issued(self._issue(Collective("all_reduce", group, tensor, [], [tensor], finish)))

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Tensor, of_each: Sequence[int], group: Group
    ) -> Issued:
        """gloo carries to all ranks what each sends, as long as the longest."""
        this = dist.get_rank(group)
        with self.at_memory():
            own = self.memory_of(sent)
            by_rank = [torch.empty(len(counts), dtype=torch.int64, device="cpu") for _ in counts]
            dist.all_gather(by_rank, torch.tensor([*counts], device="cpu"), group=group)
            carried = own.new_zeros(max(int(of_rank.sum()) for of_rank in by_rank))
            carried[: own.numel()] = own

        def finish(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
            cut = [part[: int(of.sum())].split(of.tolist()) for part, of in zip(parts, by_rank, strict=True)]
            return [(received, torch.cat([of_rank[this] for of_rank in cut]))]

        collective = Collective("all_to_all", group, carried, [sent], [received], finish)
        return Issued(self._issue(collective, numel=0))

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        sends = dist.get_rank(group) == 0
        reads, writes = ([tensor], []) if sends else ([], [tensor])
        finish: Any = lambda parts: [] if sends else [(tensor, parts[0])]  # noqa: E731
        self._issue(Collective("broadcast", group, tensor, reads, writes, finish)).wait()

    def barrier(self, group: Group) -> Issued:
        self._record("barrier", group)
        return super().barrier(group)

    def gather_objects(self, value: object, group: Group) -> list[Any]:
        self._record("gather_objects", group)
        return super().gather_objects(value, group)

    def split(self, group: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        self._record("split", group)
        return super().split(group, parts)

    def splits_communicators(self, group: dist.ProcessGroup) -> bool:
        return self.device_bound


class SimulatedWork:
    """A collective of which the result is held back until somebody waits for it. Until then its outputs are NaN."""

    def __init__(self, transport: SimulatedTransport, collective: Collective, group: str) -> None:
        self._transport, self._collective, self._queue = transport, collective, transport.queues[group]
        with transport.at_memory():
            sent = transport.memory_of(collective.sent).clone()
            self._parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(collective.group))]
            self._gloo: Any = dist.all_gather(self._parts, sent, group=collective.group, async_op=True)
            for tensor in collective.writes:
                transport.memory_of(tensor).fill_(torch.nan if tensor.is_floating_point() else NOT_THERE)

    def wait(self, timeout: object = None) -> bool:
        while self in self._queue:  # the collectives of a group arrive in order
            self._queue[0]._deliver()
        return True

    def is_completed(self) -> bool:
        raise AssertionError(
            "the library asks whether a collective has arrived: what a rank launches must not depend on that"
        )

    def check(self) -> None:
        """Before the result is there. Raises RaceFound."""

    def _deliver(self) -> None:
        """The tensors are held until here, as torch holds those of NCCL's."""
        self._gloo.wait()
        self._queue.remove(self)
        with self._transport.at_memory():
            self.check()
            for tensor, value in self._collective.finish(self._parts):
                self._transport.memory_of(tensor).copy_(value)
        del self._collective, self._parts, self._gloo


_plain_new_group = dist.new_group


def new_group_of_a_bound_device(ranks: Sequence[int] | None = None, *given: Any, **options: Any) -> Any:
    """``dist.new_group`` where a device is bound: all ranks of the job split the default communicator."""
    if ranks is not None and len(ranks) < dist.get_world_size() and options.get("use_local_synchronization"):
        raise SplitHangs(f"new_group({list(ranks)}) splits the communicator of all ranks, and only these call it")
    return _plain_new_group(ranks, *given, **options)


def split_group_of_a_bound_device(
    parent_pg: dist.ProcessGroup, split_ranks: Sequence[Sequence[int]], timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """``dist.split_group``, which gloo does not have: the ranks of ``parent_pg`` alone split its communicator.

    ``split_ranks``: as ``parent_pg`` numbers them.
    """
    ranks = dist.get_process_group_ranks(parent_pg)
    if sorted(itertools.chain(*split_ranks)) != list(range(len(ranks))):
        raise SplitHangs(f"split_group({split_ranks}) of a group of {len(ranks)} ranks leaves some out")
    own = next(part for part in split_ranks if ranks.index(dist.get_rank()) in part)
    return _plain_new_group([ranks[rank] for rank in own], timeout, use_local_synchronization=True)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In fp32, in rank order, rounded once: what gloo's path does, so that both give the same bits."""
    if not parts[0].is_floating_point():
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def different_order(by_rank: Sequence[Sequence[Entry]]) -> str:
    """Where two ranks have issued in different orders what both take part in; empty: nowhere.

    A GPU may run the collectives of all communicators one after another. Two ranks that issue two of them in different
    orders then wait for each other.
    """
    for first in range(len(by_rank)):
        for second in range(first + 1, len(by_rank)):
            both = [
                [entry for entry in by_rank[rank] if first in entry.ranks and second in entry.ranks]
                for rank in (first, second)
            ]
            for place, (one, other) in enumerate(zip(*both, strict=False)):
                if one != other:
                    return f"collective {place}: rank {first} issues {one}, rank {second} {other}"
            if len(both[0]) != len(both[1]):
                return f"rank {first} issues {len(both[0])} collectives, rank {second} {len(both[1])}"
    return ""
