"""Every collective of the package, with one account of its calls, bytes and waits.

Asynchrony is two calls: a collective returns a ``Pending``; ``Pending.wait()`` orders what follows after it.
On CUDA that is a wait of the current stream and the host goes on; under gloo the host blocks, for as long as
the group's own timeout.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import user_thread
from ..errors import ClosedError, CollectiveError, RankMismatchError
from . import groups, standstill, transport
from .gloo import GLOO
from .standstill import Issuances, Standstill, Verdict, Wait, standstill_of
from .streams import on_device
from .together import raising_together, values_of_one_call
from .transport import STREAMS, Issued, Reduction, Transport, Work

CHANNELS = 8
"""The most process groups of one comm under gloo: its own one, and its channels (see ``take_channels``)."""

SHARDED_MODEL = "a sharded model"
"""The label of a sharded model's comm."""

ON_HOST = torch.device("cpu")
"""The device from which ``torch.distributed`` sends pickled objects, if the group has a back-end for it."""


@dataclass
class Traffic:
    """An account of one kind of collective.

    Attributes:
        bytes: of the whole tensor of each call, added up. On the wire a rank sends and receives (N-1)/N of them, and
            twice that for an all-reduce.
        wait_seconds: that the host has spent in ``Pending.wait``.
    """

    kind: str
    calls: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


_live: weakref.WeakSet[Comm] = weakref.WeakSet()  # comms of optimizers, which reduce within a backward
_with_own_group: weakref.WeakSet[Comm] = weakref.WeakSet()  # comms of optimizers, and of sharded models
_meetings: dict[str, threading.Lock] = {}  # by the name of a given group: one thread at a time gathers objects over it


def _all_with_own_group() -> list[Comm]:
    while True:
        with suppress(RuntimeError):  # another thread has made one, or closed one, meanwhile
            return [*_with_own_group]


class Pending:
    """A collective under way. ``wait`` may be called any number of times; the first call runs ``on_arrival``.

    ``comm``: the comm that issued the collective, where ``wait`` holds the host, as under gloo; None: ``wait`` holds
    the current stream. ``number``: the collective's number among those of the comm. ``given``: whether it goes over the
    given group; else over the own one. ``call``: the call that every rank has to make, as "full_state_dict"; "": none.

    Attributes:
        of: the unit that the collective is for, in messages; None: the whole comm.
    """

    def __init__(
        self,
        issued: Issued,
        traffic: Traffic,
        comm: Comm | None = None,
        *,
        number: int = 0,
        given: bool = False,
        call: str = "",
    ) -> None:
        self._work: Work | None = issued.work
        self._on_arrival = issued.on_arrival
        self._comm, self._number, self._given, self._call = comm, number, given, call
        self._kind, self._traffic = traffic.kind, traffic
        self.of: str | None = None

    def arrives_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``, and tell whether ``wait`` would return at once now. Always True where the current
        stream waits: then the device is not asked."""
        # A stream waits: whether it has arrived differs from rank to rank, and must not decide what is launched next.
        if self._work is None or self._comm is None or self._work.is_completed():
            return True
        if seconds > 0:
            with suppress(RuntimeError):  # in time or not, ``wait`` says what there is to say
                self._work.wait(timedelta(seconds=seconds))
        return self._work.is_completed()

    def order_current(self) -> bool:
        """Order what follows on the current stream after the collective, though another stream will ``wait`` for it.
        Returns False, and does nothing, where the host waits, or where ``on_arrival`` has to run."""
        # ``_work`` stays: the other stream has to wait for it as well.
        if self._comm is not None or self._on_arrival is not None or self._work is None:
            return False
        self._work.wait()
        return True

    def wait(self) -> None:
        if self._work is None:
            return
        start = time.perf_counter()
        try:
            self._hold()
        except BaseException as error:
            # The ranks may have issued different numbers of collectives by now, so the next would be taken for another.
            if self._comm is not None:
                self._comm.abandon()
            if not isinstance(error, RuntimeError):  # as Ctrl-C
                raise
            # This rank has found that the ranks wait in vain: its message says more than the one below.
            if isinstance(error, RankMismatchError):
                raise
            # Another rank may have found that, and left: then the lost connection is not the cause.
            if self._comm is not None and (verdict := self._comm.given_up()) is not None:
                raise self._comm.parted(verdict, came=self._given) from error
            if self._call:
                remedy = f"every rank has to call {self._call}, at the same place in its program"
            else:
                remedy = (
                    "each must make as many synchronised backwards, and the same calls of step and clip_grad_norm_; at "
                    "stage 3 as many forwards, too"
                )
            raise CollectiveError(
                f"{self._kind} did not complete: {error}. Another rank died, raised, or does not take part: {remedy}. "
                "The first error of any rank is the cause"
            ) from error
        self._work = None  # only now: after a time-out it has not arrived, however often one asks
        self._traffic.wait_seconds += time.perf_counter() - start
        if self._on_arrival is not None:
            self._on_arrival()

    def _hold(self) -> None:
        assert self._work is not None
        comm = self._comm
        group = comm.own_group if comm is not None else None
        # Either the stream waits, and the host goes on; or there is one rank, and nobody to wait for.
        if comm is None or group is None:
            self._work.wait()
            return
        watcher = comm.standstill()
        if not self.arrives_within(0):
            comm.check_not_parted()
        while not self.arrives_within(standstill.SECONDS):
            what = f"{self._kind} of {comm.label if self.of is None else f'{self.of} of {comm.label}'}"
            wait = Wait(comm.owner, comm.whole.rounds, what, self._number, self._given, self._call)
            if (verdict := watcher.look(wait, comm.ranks, comm.issued_beside)) is not None:
                raise comm.parted(verdict, came=self._given)
        self._work.wait()  # raises where it has failed: ``wait`` then looks for another rank's verdict
        # A rank that has given up still joins this meeting, so it may be complete in vain: see ``Comm.parted``.
        if self._given and (verdict := comm.given_up()) is not None:
            raise comm.parted(verdict, came=True)
        watcher.ended()


class Comm:
    """The ranks that share one optimizer's state, and the collectives between them.

    It has two process groups of the same ranks:

    - *given*: for what every rank calls at the same place in its program, such as loading.
    - *own*: for what the optimizer sends of its own accord, reductions above all. A collective of the user's, or of
      another optimizer, that stands between two calls of ours cannot meet ours there.

    ``group=None`` is one rank, and then nothing is communicated.

    ``device``: of the tensors that will be communicated; None: the current GPU. Where the group has no back-end for the
    CPU, pickled objects are communicated as tensors on this device.

    The groups are held weakly: gloo's threads end only when ``destroy_process_group`` drops the last reference, and
    one that lets go of a tensor while the interpreter shuts down aborts the process. (In ``groups.abandon`` they wait
    for what never comes, so they let go of nothing.)
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        self._group = weakref.ref(group) if group is not None else None
        self.device = device
        self._own = self._group
        self._backends: dict[str, str] | None = None  # by type of device; read once
        self._own_name = ""  # of the own group, where it is another than the given one
        self._failed = False
        self._verdict: str | None = None  # why these ranks have parted, once they have waited for each other in vain
        self._part_of: Comm | None = None  # the comm that has these ranks and others
        self._name = ""  # of the parts of that comm, as "by nodes"
        self._parts: list[Comm] = []
        # More groups of the same ranks, under gloo. Gloo ends the process where one rank sends more than another
        # expects in the n-th broadcast, or the n-th all-reduce, of a group. Ranks that are out of step would come to
        # that. So tensors of different sizes do not share a group: such ranks wait instead, see ``standstill``.
        self._channels: dict[object, groups.Reference] = {}
        self._beside: list[weakref.ref[Comm]] = []  # of optimizers between some of the same ranks
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.rounds = 0  # of reductions that this rank has launched
        self.issued = 0  # collectives over groups of its own
        self._issued_lately: dict[int, tuple[str, int]] = {}  # their kinds and bytes, by number
        self.label = "an optimizer"  # whose collectives these are, for people
        self.traffic: dict[str, Traffic] = {}

    @property
    def shared(self) -> bool:
        """Whether another optimizer communicates between some of the same ranks. Ranks need not agree on the answer."""
        return any((other := beside()) is not None and other in _live for beside in self._beside)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The given group. Raises ClosedError where it was destroyed."""
        return self._alive(self._group)

    @property
    def own_group(self) -> dist.ProcessGroup | None:
        """The own group, or else the given one. Raises ClosedError where it was destroyed."""
        return self._alive(self._own)

    @property
    def whole(self) -> Comm:
        """The comm of all ranks of the optimizer: this one, unless it is a ``part``, such as the ranks of a node."""
        return self if self._part_of is None else self._part_of.whole

    @property
    def owner(self) -> str:
        """Name of the optimizer, or sharded model, whose collectives these are: the same on all ranks of the whole."""
        group = self.whole.own_group
        assert group is not None
        name: str = group.group_name
        return name if self._part_of is None else f"{name}, {self._name}"

    @property
    def out_of_step(self) -> bool:
        """Whether a collective of the whole, or of a part of it, has failed: the groups are of no use any more."""
        return self.whole._failed

    @out_of_step.setter
    def out_of_step(self, value: bool) -> None:
        self.whole._failed = value

    def abandon(self) -> None:
        """Note that a collective has failed for which the host waited. The process can end all the same."""
        self.out_of_step = True
        groups.abandon(group for comm in self.whole._with_parts() for group in (comm._own, *comm._channels.values()))

    def _with_parts(self) -> list[Comm]:
        return [self, *(comm for part in self._parts for comm in part._with_parts())]

    def _alive(self, reference: groups.Reference | None) -> dist.ProcessGroup | None:
        group = reference() if reference is not None else None
        if group is None and self.world_size > 1:
            raise ClosedError("the process group was destroyed: close the optimizer before, or make a new one")
        return group

    def standstill(self) -> Standstill:
        """Give the record of waits that this thread writes to while it waits here."""
        # Another thread than the main one looks at its own optimizer alone: other threads' waits say nothing about it.
        return standstill_of(self.whole.ranks, self.owner if user_thread.is_beside() else "")

    def issued_beside(self) -> Issuances:
        """List what was issued lately, by owner, over own groups of exactly the ranks of the whole."""
        living = [comm for comm in _all_with_own_group() if groups.alive(comm._own) is not None]
        beside = {comm for comm in (self.whole, *living) if comm.ranks == self.whole.ranks}
        # Copied first: another thread may issue meanwhile.
        lately = {comm.owner: [*comm._issued_lately.items()] for comm in beside}
        return {
            owner: [(number, f"{kind} of {nbytes}") for number, (kind, nbytes) in of] for owner, of in lately.items()
        }

    def parted(self, verdict: Verdict, *, came: bool) -> RankMismatchError:
        """Stop every comm whose ranks have waited in vain, by ``verdict``. Return the error that says so.

        Such comms send nothing more over their own groups: another rank would take it for something else, or not at
        all. The given group stays in use, for new optimizers. So a rank that has not come to the meeting in which
        others wait there comes now: else they would take its next meeting for this one.

        Args:
            came: whether this rank waits in that meeting itself.
        """
        # Comms of destroyed groups are left out: a new group can have such a group's name.
        living = [comm for comm in _all_with_own_group() if groups.alive(comm._own) is not None]
        for comm in {self.whole, *living}:
            if comm is self.whole or any(standstill.whole_of(of) == comm._own_name for of in verdict.owners):
                comm._verdict = verdict.text
                comm.abandon()
            if comm._own_name and comm._own_name == verdict.met and not came:
                comm._transport(ON_HOST).barrier(comm.group)
        return RankMismatchError(verdict.text)

    def check_not_parted(self) -> None:
        """Raise RankMismatchError, at once, where these ranks have waited for each other in vain before."""
        if (verdict := self.whole._verdict) is not None:
            new = "a new model and optimizer" if self.whole.label == SHARDED_MODEL else "a new optimizer"
            raise RankMismatchError(
                f"an earlier error has parted the ranks: make {new} to go on. The error was: {verdict}"
            )

    def given_up(self) -> Verdict | None:
        """Read the verdict of another rank that has found the ranks waiting in vain, and waits no more; None: none."""
        if not dist.is_initialized():
            return None
        watcher = self.standstill()
        verdict = watcher.verdict()
        watcher.ended()
        return verdict

    def check_alone(self) -> None:
        """Raise where this was made for one rank, and there are several by now: each rank would train alone."""
        # A group of one rank that was given on purpose is something else: it trains alone, and is to.
        if self._group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RankMismatchError(
                "torch.distributed was initialised after this optimizer was made, so it would update this rank alone: "
                "make it after init_process_group; to train alone, give it process_group=dist.new_group([this rank])"
            )

    def separate(self) -> None:
        """Collective. Take a group of its own, and learn whether another optimizer communicates between the same ranks.

        Two such optimizers may reduce in one backward, of which ranks use different parts. So neither may wait in it.
        """
        if self.world_size == 1:
            return
        # Before it looks for others: so each of two optimizers knows the other, in whichever order a rank makes them.
        _live.add(self)
        ranks = dist.get_process_group_ranks(self.group)
        others = [other for other in _live if other is not self and len({*ranks} & {*other._ranks()}) > 1]
        for other in others:
            self._beside.append(weakref.ref(other))
            other._beside.append(weakref.ref(self))
        self._take_group(ranks, "the constructor", needed=any(other._ranks() == ranks for other in others))

    def take_own_group(self) -> None:
        """Collective. Take a group of its own for a sharded model: its gathers run beside all else."""
        self.label = SHARDED_MODEL
        if self.world_size > 1:
            self._take_group(dist.get_process_group_ranks(self.group), "shard_module", needed=True)

    def take_channels(self, of: Iterable[object], device: torch.device, where: str) -> None:
        """Collective. Take one more group for each key: the bytes of a gathered tensor, or "all_reduce" for gradients.

        The own group serves where the stream waits, where no group can be made, and beyond ``CHANNELS - 1`` keys.
        """
        if self.world_size == 1 or not self.host_waits(device):
            return
        ranks = dist.get_process_group_ranks(self.group)
        for key in [*of][: CHANNELS - 1]:
            # Where one cannot be made, on any rank, the next cannot either.
            if (group := self._obtain(ranks, where, needed=False)) is None:
                return
            self._channels[key] = weakref.ref(group)

    def _channel(self, of: object) -> dist.ProcessGroup | None:
        return self._alive(self._channels.get(of, self._own))

    def _take_group(self, ranks: list[int], where: str, *, needed: bool) -> None:
        """``needed``: raise where none can be made; else go on over the given group, which another may use, too."""
        if (own := self._obtain(ranks, where, needed=needed)) is not None:
            self._own, self._own_name = weakref.ref(own), own.group_name
            _with_own_group.add(self)

    def _obtain(self, ranks: list[int], where: str, *, needed: bool) -> dist.ProcessGroup | None:
        return groups.take(self, ranks, lambda: self._split([ranks]), where, needed=needed)

    def new_host_group(self) -> dist.ProcessGroup:
        """Collective. A new group of these ranks over gloo."""
        if not groups.can_be_made(self):
            raise RankMismatchError(
                "a process group for saving in the background cannot be made here: some ranks are in more groups than "
                "others. Save without background=True"
            )
        assert self.group is not None
        return self._transport(ON_HOST).host_group(self.group)

    def connect(self, device: torch.device) -> None:
        """Collective. Let NCCL connect the ranks of the own group now, for tensors on ``device``.

        By itself NCCL connects where a kind of collective is first used, and holds the host until all ranks have come.
        In the first backward a rank that has raised would not come.
        """
        for kind in ("reduce_scatter", "all_gather", "all_reduce"):
            self.connect_for(kind, self.world_size, torch.float32, device)

    def connect_for(self, kind: str, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Collective. Connect for one kind of collective, on a flat tensor [numel], a multiple of the number of ranks.
        NCCL chooses an algorithm by size, and connects the ranks for each algorithm when that is first used."""
        if self.world_size == 1 or self.host_waits(device):
            return
        transport, group = self._transport(device), self.own_group
        full = torch.zeros(numel, dtype=dtype, device=device)
        own = self.own_part(full)
        if kind == "reduce_scatter":
            issued = transport.reduce_scatter(Reduction(full, own, own, accumulate=False), group, full.new_empty)
        elif kind == "all_gather":
            issued = transport.all_gather(full, own, group)
        else:
            issued = transport.all_reduce(full, group)
        self._pending(issued, "construction", full).wait()

    def of_consecutive(self, count: int) -> Comm:
        """Collective. Make a part of the ``count`` consecutive ranks around this one; ``count`` divides all ranks."""
        ranks = dist.get_process_group_ranks(self.group)
        return self.part([ranks[start : start + count] for start in range(0, len(ranks), count)], "by nodes")

    def part(self, parts: Sequence[Sequence[int]], name: str) -> Comm:
        """Collective. Make a comm of this rank's part, with the same account of traffic.

        Args:
            parts: these ranks, as the whole job numbers them, each in one part.
            name: of the parts, in messages. The same parts under another name get groups of their own.
        """
        assert self.own_group is not None
        # Groups of parts belong to the own group: an optimizer that takes it over takes them over, too.
        group = groups.part_of(self.own_group, parts, name, lambda: self._split([list(part) for part in parts]))
        made = Comm(group, self.device)
        made.traffic, made.label, made._part_of, made._name = self.traffic, self.label, self, name
        self._parts.append(made)
        return made

    @property
    def ranks(self) -> list[int]:
        """Numbers of these ranks in the whole job; of one rank without a group, 0."""
        return self._ranks() or [0]

    def _ranks(self) -> list[int]:
        group = groups.alive(self._group) if dist.is_initialized() else None
        return dist.get_process_group_ranks(group) if group is not None else []

    def close(self) -> None:
        """Leave its own groups to later optimizers, unless something may still be under way over them."""
        _live.discard(self)
        _with_own_group.discard(self)
        for part in self._parts:
            part.close()
        own = [*self._channels.values()]
        if self._own is not None and self._own is not self._group:
            own.append(self._own)
        # After a failure another rank may still send in them: what the next optimizer receives could be that.
        if own and not self.out_of_step:
            groups.leave(self._ranks(), own)
        self._own = self._group
        self._channels.clear()

    def _split(self, parts: list[list[int]]) -> dist.ProcessGroup:
        """Collective. Make a new group of this rank's part of these ranks."""
        assert self.group is not None
        return self._transport(ON_HOST).split(self.group, parts)

    def _transport(self, device: torch.device) -> Transport:
        """Choose the transport for tensors on ``device``."""
        if (used := transport.used()) is not None:
            return used
        if self._backends is None:
            self._backends = transport.backends(self.group) if self.group is not None else {}
        return GLOO if self._backends.get(device.type) == "gloo" else STREAMS

    def backend_of(self, device: torch.device) -> str | None:
        """The name of the back-end that serves tensors on ``device``; None: there is none, or one rank alone."""
        return transport.backends(self.group).get(device.type) if self.group is not None else None

    def host_waits(self, device: torch.device) -> bool:
        """Whether the host itself waits for what is communicated from ``device``."""
        return self._group is not None and self._transport(device).host_waits

    def reduce_scatter(self, full: Tensor, out: Tensor, lend: Callable[[int], Tensor], *, accumulate: bool) -> Pending:
        """Sum ``full`` [N * shard] over the ranks; this rank's shard of the sum goes to ``out`` [shard].

        Args:
            full: contribution of this rank; its contents are lost. ``out`` may be this rank's own part of it.
            lend: lends so many elements of ``full``'s dtype until the sum is there; called under gloo.
            accumulate: add to ``out`` instead of overwriting it; ``out`` is then no part of ``full``.
        """
        self.check_not_parted()
        reduction = Reduction(full, self.own_part(full), out, accumulate)
        issued = self._transport(full.device).reduce_scatter(reduction, self.own_group, lend)
        return self._pending(issued, "reduce_scatter", full)

    def all_reduce(
        self, full: Tensor, on_arrival: Callable[[], object] | None = None, *, number: int | None = None
    ) -> Pending:
        """Sum ``full`` over the ranks, in place. ``number``: the one that ``reserve`` gave for it."""
        self.check_not_parted()
        issued = self._transport(full.device).all_reduce(full, self._channel("all_reduce"))
        return self._pending(Issued(issued.work, on_arrival), "all_reduce", full, number)

    def reserve(self) -> int:
        """Number a collective that is issued later: so all ranks number it alike, whenever each of them issues it."""
        self.whole.issued += 1
        return self.whole.issued

    def all_gather(self, full: Tensor, kind: str = "all_gather", own: Tensor | None = None) -> Pending:
        """Fill ``full`` [N * shard] with every rank's own part of it, in place. ``own``: that part, a view, where the
        caller has it at hand."""
        self.check_not_parted()
        own = self.own_part(full) if own is None else own
        issued = self._transport(full.device).all_gather(full, own, self._channel(full.nbytes))
        return self._pending(issued, kind, full)

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], of_each: Sequence[int], kind: str = "all_to_all"
    ) -> Tensor:
        """Send ``counts[i]`` elements of ``sent``, flat, to each rank i. Returns the ``of_each[i]`` elements that each
        rank i has sent to this one, in rank order, before what follows."""
        self.check_not_parted()
        received = sent.new_empty(sum(of_each))
        group = self.own_group
        assert group is not None
        issued = self._transport(sent.device).all_to_all(sent, counts, received, of_each, group)
        self._pending(issued, kind, sent, alike=False).wait()
        return received

    def exchange(
        self, vector: Tensor, *, maximum: bool = False, kind: str = "exchange", call: str = "", alike: bool = True
    ) -> None:
        """Sum (or maximise) a small vector over the ranks, in place, ordered before what follows.

        ``call``: see ``Pending``. ``alike``: see ``_pending``.
        """
        if self.world_size > 1:
            self.check_not_parted()
            issued = self._transport(vector.device).all_reduce(vector, self.own_group, maximum=maximum)
            self._pending(issued, kind, vector, call=call, alike=alike).wait()

    def _pending(
        self,
        issued: Issued,
        kind: str,
        tensor: Tensor,
        number: int | None = None,
        call: str = "",
        *,
        alike: bool = True,
    ) -> Pending:
        """``alike``: whether ``tensor`` has one size on all ranks of the whole, and so tells collectives apart."""
        number = self.reserve() if number is None else number
        lately = self.whole._issued_lately
        lately[number] = kind, tensor.nbytes if alike else 0
        if len(lately) > standstill.ISSUED_LATELY:
            del lately[next(iter(lately))]
        comm = self if self.host_waits(tensor.device) else None
        return Pending(issued, self._record(kind, tensor), comm, number=number, call=call)

    def broadcast(self, tensor: Tensor, kind: str = "construction") -> None:
        """Copy rank 0's ``tensor`` to every rank, in place."""
        if self.world_size > 1:
            self._record(kind, tensor)
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
        self.check_not_parted()
        group = self.group
        assert group is not None
        # Two threads that gather over one group would receive each other's objects.
        with _meetings.setdefault(group.group_name, threading.Lock()):
            if self.host_waits(ON_HOST):  # ``standstill`` can look in this wait, but not in torch's own that follow
                meeting = self._transport(ON_HOST).barrier(group)
                Pending(
                    meeting, Traffic(f"the wait for the other ranks in {where}"), self, given=True, call=where
                ).wait()
            with on_device(self.device):
                reports = self._transport(ON_HOST).gather_objects((where, self.owner, value), group)
        return values_of_one_call(self.ranks, reports)

    def raising_together(self, where: str, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Collective. See ``together.raising_together``.

        Args:
            device: of one number that is reduced first, over the own group, and tells whether any rank has failed: for
                frequent calls. None: every rank gets an object of each, which takes 0.3 s among 16,384.
        """
        return raising_together(self, where, lambda failed: device is None or self._any(failed, device, where))

    def _any(self, here: bool, device: torch.device, where: str) -> bool:
        """Collective. Whether it is so on any rank. The host waits."""
        flag = torch.full((1,), float(here), dtype=torch.float32, device=device)
        self.exchange(flag, maximum=True, kind="construction", call=where)
        return bool(flag)

    def own_part(self, full: Tensor) -> Tensor:
        """This rank's 1/N of a flat tensor, a view."""
        shard_numel = full.numel() // self.world_size
        return full.narrow(0, self.rank * shard_numel, shard_numel)

    def stats(self) -> dict[str, dict[str, float]]:
        counted = ("calls", "bytes", "wait_seconds")
        return {kind: {name: getattr(of, name) for name in counted} for kind, of in self.traffic.items()}

    def _record(self, kind: str, tensor: Tensor) -> Traffic:
        traffic = self.traffic.get(kind)
        if traffic is None:
            traffic = self.traffic[kind] = Traffic(kind)
        traffic.calls += 1
        traffic.bytes += tensor.nbytes
        return traffic


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
