"""Every collective of the package, with one account of its calls, bytes and waits.

A collective returns a ``Handle``; ``Handle.wait()`` orders later work after it. On CUDA that is a wait of the current
stream and the host goes on; under gloo the host blocks, for as long as the group's own time-out, or until ``deadlock``
finds that the ranks wait for each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankMismatchError, ZeroOptimError
from . import groups, transport
from .deadlock import Log, Watch
from .handle import Handle, Traffic
from .streams import on_device
from .together import values_of_one_call
from .transport import GLOO, STREAMS, Reduction, Transport

CHANNELS = 8
"""The most process groups of one comm under gloo: its own one, and its channels (see ``Groups``)."""

ON_HOST = torch.device("cpu")
"""The device from which ``torch.distributed`` sends pickled objects, if the group has a back-end for it."""

_reducing: weakref.WeakSet[Comm] = weakref.WeakSet()  # comms of optimizers, which reduce within a backward
_meetings: dict[str, threading.Lock] = {}  # by the name of a given group: one thread at a time gathers objects over it


class Comm:
    """The ranks that split one optimizer's state, and the collectives between them, over its ``Groups``.

    ``group=None`` is one rank, and then nothing is communicated.

    Args:
        device: of the tensors that will be communicated; None: the current GPU. Where the group has no back-end for the
            CPU, pickled objects are communicated as tensors on this device.

    Attributes:
        whole: the comm of all ranks of the optimizer: this one, unless it is a ``part``, such as the ranks of a node.
        log: what was issued for the whole.
        label: whose collectives these are, for people.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        self.groups = groups.Groups(group)
        self.device = device
        self._backends: dict[str, str] | None = None  # by type of device; read once
        self.whole = self
        self._name = ""  # of the parts of the whole, as "by nodes"
        self._parts: list[Comm] = []  # of the whole, and parts of these
        self._beside: list[weakref.ref[Comm]] = []  # of optimizers between some of the same ranks
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.log = Log(self)
        self.label = "an optimizer"
        self.traffic: dict[str, Traffic] = {}

    @property
    def contended(self) -> bool:
        """Whether another optimizer communicates between some of the same ranks. Ranks need not agree on the answer."""
        return any((other := beside()) is not None and other in _reducing for beside in self._beside)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The given group. Raises ClosedError where it was destroyed."""
        return self.groups.given

    @property
    def ranks(self) -> list[int]:
        """Numbers of these ranks in the whole job; of one rank without a group, 0."""
        return self.groups.ranks or [0]

    @property
    def owner(self) -> str:
        """Name of the optimizer, or sharded model, whose collectives these are: the same on all ranks of the whole."""
        group = self.whole.groups.own
        assert group is not None
        name: str = group.group_name
        return name if self.whole is self else f"{name}, {self._name}"

    @property
    def out_of_step(self) -> bool:
        """Whether a collective of the whole, or of a part of it, has failed: the groups are of no use any more."""
        return self.log.failed

    def abandon(self) -> None:
        """Record that a collective has failed. Where the host waited for it, the process can end all the same."""
        self.log.failed = True
        for comm in (self.whole, *self.whole._parts):
            comm.groups.abandon()

    def check_alone(self) -> None:
        """Raise where this was made for one rank, and there are several by now: each rank would train alone."""
        # A group of one rank that was given on purpose is something else: it trains alone, and is to.
        if not self.groups.exist and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RankMismatchError(
                "torch.distributed was initialised after this optimizer was made, so it would update this rank alone: "
                "make it after init_process_group; to train alone, give it process_group=dist.new_group([this rank])"
            )

    # -- groups ----------------------------------------------------------------------------------------------------

    def separate(self) -> None:
        """Collective. Take a group of its own, and find other optimizers that communicate between the same ranks."""
        if self.world_size == 1:
            return
        # Two such optimizers may reduce in one backward, of which ranks use different parts. So neither may wait in it.
        # Before it looks for others: so each of two optimizers knows the other, in whichever order a rank makes them.
        _reducing.add(self)
        ranks = self.ranks
        others = [other for other in _reducing if other is not self and len({*ranks} & {*other.groups.ranks}) > 1]
        for other in others:
            self._beside.append(weakref.ref(other))
            other._beside.append(weakref.ref(self))
        self.take_own_group("the constructor", needed=any(other.groups.ranks == ranks for other in others))

    def take_own_group(self, where: str, *, needed: bool = True) -> None:
        """Collective. Take a group of its own. ``needed``: raise RankMismatchError where none can be made; else go on
        over the given group, which another may use, too."""
        if self.world_size == 1:
            return
        if (own := groups.take(self, lambda: self._split([self.ranks], "own"), where, needed=needed)) is not None:
            self.groups.use_own(own)

    def take_channels(self, of: Iterable[object], device: torch.device, where: str) -> None:
        """Collective. Take one more group for each key: the bytes of a gathered tensor, or "all_reduce" for gradients.

        The own group serves where the stream waits, where no group can be made, and beyond ``CHANNELS - 1`` keys.
        """
        if self.world_size == 1 or not self.host_waits(device):
            return
        for key in [*of][: CHANNELS - 1]:
            # Where one cannot be made, on any rank, the next cannot either.
            if (group := groups.take(self, lambda: self._split([self.ranks], "own"), where, needed=False)) is None:
                return
            self.groups.channels[key] = weakref.ref(group)

    def part(self, parts: Sequence[Sequence[int]], name: str) -> Comm:
        """Collective. Make a comm of this rank's part, with the same account of traffic.

        Args:
            parts: these ranks, as the whole job numbers them, each in one part.
            name: of the parts, in messages. The same parts under another name get groups of their own.
        """
        own = self.groups.own
        assert own is not None
        # Groups of parts belong to the own group: an optimizer that takes it over takes them over, too.
        group = groups.part_of(own, parts, name, lambda: self._split(parts, name))
        made = Comm(group, self.device)
        made.whole, made.log, made.traffic = self.whole, self.log, self.traffic
        made.label, made._name = self.label, name
        self.whole._parts.append(made)
        return made

    def _split(self, parts: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup:
        """Collective. Make a new group of this rank's part of these ranks."""
        assert self.group is not None
        return self._transport(ON_HOST).split(self.group, parts, purpose)

    def close(self) -> None:
        """Leave its own groups to later optimizers, unless something may still be in flight over them."""
        _reducing.discard(self)
        for part in self._parts:
            part.close()
        # After a failure another rank may still send in them: what the next optimizer receives could be that.
        self.groups.leave(reusable=not self.out_of_step)

    def connect(self, device: torch.device) -> None:
        """Collective. Let NCCL connect the ranks of the own group now, for tensors on ``device``."""
        # By itself NCCL connects where a kind of collective is first used, and holds the host until all ranks have
        # come. In the first backward a rank that has raised would not come.
        for kind in ("reduce_scatter", "all_gather", "all_reduce"):
            self.connect_for(kind, self.world_size, torch.float32, device)

    def connect_for(
        self, kind: str, numel: int, dtype: torch.dtype, device: torch.device, memory: Tensor | None = None
    ) -> None:
        """Collective. Connect for one kind of collective, on a flat tensor [numel], a multiple of the number of ranks.
        NCCL chooses an algorithm by size, and connects the ranks for each algorithm when that is first used.

        ``memory``: [bytes] uint8, which is overwritten; None, or too small, or deallocated: it takes memory for this.
        """
        if self.world_size == 1 or self.host_waits(device):
            return
        transport, group, nbytes = self._transport(device), self.groups.own, numel * dtype.itemsize
        if memory is None or memory.untyped_storage().nbytes() < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        full = memory[:nbytes].view(dtype).zero_()
        own = self.own_part(full)
        if kind == "reduce_scatter":
            handle = transport.reduce_scatter(Reduction(full, own, own, accumulate=False), group, full.new_empty)
        elif kind == "all_gather":
            handle = transport.all_gather(full, own, group)
        else:
            handle = transport.all_reduce(full, group)
        self._record(handle, "construction", full).wait()

    def _transport(self, device: torch.device) -> Transport:
        if (used := transport.used()) is not None:
            return used
        if self._backends is None:
            self._backends = transport.backends(self.group) if self.group is not None else {}
        return GLOO if self._backends.get(device.type) == "gloo" else STREAMS

    def host_waits(self, device: torch.device) -> bool:
        """Whether the host itself waits for what is communicated from ``device``."""
        return self.groups.exist and self._transport(device).host_waits

    # -- collectives -----------------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        full: Tensor,
        out: Tensor,
        lend: Callable[[int], Tensor],
        *,
        accumulate: bool,
        scale: float = 1.0,
        kind: str = "reduce_scatter",
        number: int | None = None,
    ) -> Handle:
        """Sum ``full`` [N * shard] over the ranks; this rank's shard of the sum goes to ``out`` [shard]. See
        ``Reduction``. ``lend``: lends so many elements of ``full``'s dtype until the sum is there. ``number``: reserved
        for it in the log."""
        self.log.check()
        reduction = Reduction(full, self.own_part(full), out, accumulate, scale)
        handle = self._transport(full.device).reduce_scatter(reduction, self.groups.own, lend)
        return self._record(handle, kind, full, number)

    def all_reduce(
        self, full: Tensor, on_arrival: Callable[[], object] | None = None, *, number: int | None = None
    ) -> Handle:
        """Sum ``full`` over the ranks, in place; then run ``on_arrival``. ``number``: reserved for it in the log."""
        self.log.check()
        handle = self._transport(full.device).all_reduce(full, self.groups.channel("all_reduce"))
        handle.on_arrival = on_arrival
        return self._record(handle, "all_reduce", full, number)

    def all_gather(
        self, full: Tensor, kind: str = "all_gather", own: Tensor | None = None, *, number: int | None = None
    ) -> Handle:
        """Fill ``full`` [N * shard] with every rank's ``own`` [shard], which may be elsewhere, and is not written until
        the arrival; None: it is in its place in ``full``. ``number``: reserved for it in the log."""
        self.log.check()
        own = self.own_part(full) if own is None else own
        handle = self._transport(full.device).all_gather(full, own, self.groups.channel(full.nbytes))
        return self._record(handle, kind, full, number)

    def all_to_all(self, sent: Tensor, counts: Sequence[int], of_each: Sequence[int], kind: str) -> Tensor:
        """Send ``counts[i]`` elements of ``sent``, flat, to each rank i. Returns the ``of_each[i]`` elements that each
        rank i has sent to this one, in rank order, before what follows."""
        self.log.check()
        received = sent.new_empty(sum(of_each))
        group = self.groups.own
        assert group is not None
        handle = self._transport(sent.device).all_to_all(sent, counts, received, of_each, group)
        self._record(handle, kind, sent, alike=False).wait()
        return received

    def exchange(
        self, vector: Tensor, *, maximum: bool = False, kind: str = "exchange", call: str = "", alike: bool = True
    ) -> None:
        """Sum (or maximise) a small vector over the ranks, in place, ordered before what follows.

        ``call``: that every rank has to make, for messages. ``alike``: see ``_record``.
        """
        if self.world_size > 1:
            self.log.check()
            handle = self._transport(vector.device).all_reduce(vector, self.groups.own, maximum=maximum)
            handle.call = call
            self._record(handle, kind, vector, alike=alike).wait()

    def _record(
        self, handle: Handle, kind: str, tensor: Tensor, number: int | None = None, *, alike: bool = True
    ) -> Handle:
        """``alike``: whether ``tensor`` has one size on all ranks of the whole, and so distinguishes collectives."""
        number = self.log.issue(kind, tensor.nbytes if alike else 0, number)
        handle.traffic = self._count(kind, tensor)
        handle.watch = Watch(self, number) if self.host_waits(tensor.device) else None
        return handle

    def _count(self, kind: str, tensor: Tensor) -> Traffic:
        traffic = self.traffic.setdefault(kind, Traffic(kind))
        traffic.calls += 1
        traffic.bytes += tensor.nbytes
        return traffic

    def broadcast(self, tensor: Tensor, kind: str = "construction") -> None:
        """Copy rank 0's ``tensor`` to every rank, in place."""
        if self.world_size > 1:
            self._count(kind, tensor)
            # A back-end sends memory as it lies: of a view with gaps, what is in the gaps, too.
            dense = tensor.contiguous()
            self._transport(dense.device).broadcast(dense, self.group)
            if dense is not tensor:
                tensor.copy_(dense)

    def gather_objects(self, value: Any, where: str) -> list[Any]:
        """Gather every rank's ``value``, in rank order. For construction and loading: it pickles and reads on the host.

        Raises RankMismatchError, on every rank, unless all give the same ``where``, for the same optimizer.
        """
        if self.world_size == 1:
            return [value]
        self.log.check()
        group = self.group
        assert group is not None
        # Two threads that gather over one group would receive each other's objects.
        with _meetings.setdefault(group.group_name, threading.Lock()):
            if self.host_waits(ON_HOST):  # the detector can look in this wait, but not in torch's own that follow
                meeting = self._transport(ON_HOST).barrier(group)
                meeting.traffic = Traffic(f"the wait for the other ranks in {where}")
                meeting.call, meeting.watch = where, Watch(self, given=True)
                meeting.wait()
            with on_device(self.device):
                reports = self._transport(ON_HOST).gather_objects((where, self.owner, value), group)
        return values_of_one_call(self.ranks, reports)

    @contextmanager
    def raising_together(
        self, where: str, device: torch.device | None = None, elsewhere: type[ZeroOptimError] = RankMismatchError
    ) -> Iterator[None]:
        """Collective. Raise on all ranks where any raises within: its own error there, elsewhere one that names that
        rank. A rank that raised alone would leave the others waiting for it.

        Args:
            device: of one flag that is reduced first, over the own group: whether any rank has failed. For frequent
                calls. None: every rank gets an object of each, which takes 0.3 s among 16,384.
            elsewhere: what the ranks raise that have not failed.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if device is not None:
            any_failed = torch.full((1,), float(error is not None), dtype=torch.float32, device=device)
            self.exchange(any_failed, maximum=True, kind="construction", call=where)
            if not any_failed:  # the host waits
                return
        reports = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}", where)
        if error is not None:
            raise error
        by_rank = zip(self.ranks, reports, strict=True)
        failed = [f"rank {rank} failed with {report}" for rank, report in by_rank if report is not None]
        if failed:
            raise elsewhere("; ".join(failed))

    def own_part(self, full: Tensor) -> Tensor:
        """This rank's 1/N of a flat tensor, a view."""
        shard_numel = full.numel() // self.world_size
        return full.narrow(0, self.rank * shard_numel, shard_numel)

    def stats(self) -> dict[str, dict[str, float]]:
        counted = ("calls", "bytes", "wait_seconds")
        return {kind: {name: getattr(of, name) for name in counted} for kind, of in self.traffic.items()}


def make_comm(process_group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Comm:
    """Make a comm of the given group, else of the default one, else of one rank without ``torch.distributed``.

    ``device``: see ``Comm``.
    """
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ValueError("this rank is not in process_group: make the optimizer on the group's own ranks only")
    if process_group is not None and (ranks := dist.get_process_group_ranks(process_group)) != sorted(ranks):
        raise ValueError(f"process_group has its ranks in the order {ranks}: give one with ascending ranks")
    return Comm(process_group, device)


def described_groups(comm: Comm) -> dict[str, tuple[str, list[int]]]:
    """The description and ranks of each process group of ``comm`` and its parts, by the group's name."""
    every = [group for of in (comm, *comm._parts) for group in of.groups.existing]
    return {group.group_name: (group.group_desc, dist.get_process_group_ranks(group)) for group in every}
