"""The state of all shards: it follows edits of parameters, moves to other layouts, is saved and loaded."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.handle import debug_options
from ..comm.sharding import Sharding, as_sent, gather_slices, whole_of
from ..comm.streams import deallocate
from ..errors import OffloadError
from ..grads.bucket import Bucket
from ..params.layout import SlotPiece
from ..rules.codec import StateTensor
from ..rules.group_rules import GroupRules
from ..rules.update_rule import has_master, stored_for
from ..stores.disk_pages import DiskBacking
from ..stores.host_threads import host_threads
from ..stores.state_store import HostStore, StateStore
from .batches import LostState, ShardBatch, batches_of, in_turn
from .saved_state import Copy
from .shard_state import ShardState
from .workplace import Coefficients

_version_of = operator.attrgetter("_version")


@dataclass(frozen=True)
class StatePiece:
    """A slot's part of one tensor of a shard's state."""

    shard: ShardState
    tensor: StateTensor
    piece: SlotPiece


class Versions:
    """Version counters of the parameters: shows which ones somebody else has written since their masters were made."""

    def __init__(self) -> None:
        self.mastered: dict[int, Tensor] = {}  # by index, those that have a master beside them
        self._all: list[Tensor] = []
        self._versions: list[int] = []  # of those with a master, unless somebody else has written

    def record(self, parameters: Sequence[Tensor], mastered: Mapping[int, Tensor]) -> None:
        """Take these parameters, as they are now, as unwritten."""
        self._all, self.mastered = list(parameters), dict(mastered)
        self._versions = [*map(_version_of, self.mastered.values())]

    def mark_stale(self) -> None:
        """Have the next ``written`` return all parameters with a master."""
        self._versions = [-1] * len(self.mastered)

    def written(self) -> set[int]:
        """Find the parameters with a master that were written since the last call, by index."""
        before, self._versions = self._versions, [*map(_version_of, self.mastered.values())]
        if self._versions == before:  # as a rule
            return set()
        pairs = zip(self.mastered, self._versions, before, strict=True)
        return {index for index, now, then in pairs if now != then}

    def count_update(self) -> None:
        """Count up all versions: a backward through a graph older than this update must raise."""
        torch.autograd.graph.increment_version(self._all)
        self._versions = [version + 1 for version in self._versions]


class OptimizerState:
    """The shard states of all buckets.

    Args:
        parameters: all trained parameters, by index.
        group: gives the parameter group of a parameter, by its index.
        disk: see ``LostState``.

    Attributes:
        lost: the record of state that a store has lost.
    """

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        sharding: Sharding,
        rules: GroupRules,
        store: StateStore,
        *,
        group: Callable[[int], Mapping[str, Any]],
        disk: DiskBacking | None = None,
    ) -> None:
        self.parameters, self.sharding, self.rules, self._store = parameters, sharding, rules, store
        self._group = group
        self.lost = LostState(parameters, disk)
        self.shards: list[ShardState] = []
        self._finds_edits = "edits" in debug_options()
        self._aside: list[tuple[Bucket, Tensor]] = []  # parameters, while their averages are shown
        self._batches: list[ShardBatch] = []  # of the shards, in the order in which the next forward wants them
        self.started = False  # whether state may differ from what it is at construction
        self._versions = Versions()

    def grow(self, buckets: Sequence[Bucket]) -> None:
        """Make state for new buckets, whose parameters come last in ``parameters``."""
        self.refresh_edited()
        self.shards += self._shard_states(buckets)
        self._batches = batches_of(self.shards[::-1], self.lost)
        self._record_versions()

    def close(self, *, wait: bool = True) -> None:
        """Release all state. ``wait``: for copies to and from the host."""
        old, self.shards, self._batches = self.shards, [], []
        try:
            # Not where ranks are out of sync: a copy may come after a reduction that never ends.
            while old and wait:
                old.pop().release()
        finally:
            self._store.close()

    # -- edits of parameters -------------------------------------------------------------------------------------

    def _record_versions(self) -> None:
        parameters = self.parameters
        dtypes = {parameter.dtype for parameter in parameters.values()}
        by_kind = {(id(rule), dtype): has_master(rule, dtype) for rule in self.rules.all for dtype in dtypes}
        mastered = {i: p for i, p in parameters.items() if by_kind[id(self.rules.of(i)), p.dtype]}
        self._versions.record([*parameters.values()], mastered)

    def refresh_edited(self) -> None:
        """Refresh the masters of parameters written in place since the last update, by their version counters.

        Tensors that were assigned to ``.data`` are copied into the buckets first.
        """
        for shard in self.shards:
            shard.bucket.flat.take_assigned()
        written = self._versions.written()
        if not self.started:  # models are often initialised through ``.data``
            written = set(self._versions.mastered)
        if written:
            self.refresh_masters(written)
        # A comparison with the fp32 masters shows edits that no version counter does.
        for shard in self.shards if self._finds_edits and self.started else ():
            for number in shard.edited():
                warnings.warn(
                    f"{shard.bucket.label(number)} was edited in a way that its version counter does not show, such as "
                    "through p.data, and its fp32 master would have overwritten the edit: edit it in place under "
                    'torch.no_grad(), call opt.refresh_master() after the edit, or leave out master="fp32"',
                    stacklevel=2,
                )
                self.refresh_masters({shard.bucket.layout.slots[number].param})

    def refresh_masters(self, indices: set[int]) -> None:
        for shard, pieces in self._pieces(indices):
            with self.lost.recording(shard):
                shard.refresh_masters(pieces)

    def mark_updated(self) -> None:
        """Record that the parameters were updated."""
        self.started = True
        self._versions.count_update()

    # -- update --------------------------------------------------------------------------------------------------

    def _shard_states(self, buckets: Sequence[Bucket]) -> list[ShardState]:
        ruled = [(bucket, self.rules.of(bucket.layout.slots[0].param)) for bucket in buckets]  # a bucket has one
        numels: dict[StateTensor, list[int]] = {}
        for bucket, rule in ruled:
            bucket.zero_copy &= not isinstance(self._store, HostStore)  # which takes the sum as it arrives, undivided
            for tensor in stored_for(rule, bucket.dtype):
                numels.setdefault(tensor, []).append(tensor.span(0, bucket.layout.shard_numel)[1])
        zeros = {tensor: self._store.zeros(of_pages, tensor.dtype) for tensor, of_pages in numels.items()}
        return [ShardState(bucket, rule, self._store, zeros, group=self._group) for bucket, rule in ruled]

    def to_update(self, by: Coefficients) -> Iterator[tuple[ShardBatch, Coefficients]]:
        """Yield all batches, and what each is to be updated by before the next is asked for. The state of later batches
        is prefetched meanwhile."""
        host = self._store if isinstance(self._store, HostStore) else None
        here = by if host is None else by.on_host()
        with nullcontext() if host is None else host_threads(host.threads):
            for batch in in_turn(self._batches, self._store.lookahead, self.lost):
                yield batch, here
        if host is not None:
            by.marks.copy_(here.marks, non_blocking=True)
        self._store.end_step()

    def raise_lost_together(self) -> None:
        """Collective where a store can lose a page."""
        if self._store.may_lose:
            with self.sharding.world.raising_together("reading the state"):
                self.lost.check()

    # -- another layout ------------------------------------------------------------------------------------------

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Follow the parameters into new buckets. State that was started moves over, one old bucket at a time."""
        old, self.shards, self._batches = self.shards, [], []
        while old and not self.started:  # their state is as at construction, and is made again
            old.pop().release()
        # Memory may be lacking on one rank, and what follows may be collective.
        with self.sharding.world.raising_together("laying out the state", self.sharding.device):
            self.shards = self._shard_states(buckets)
        places = {piece.slot.param: (shard, piece) for shard in self.shards for piece in shard.bucket.pieces}
        while old:
            for tensor in old[-1].stored:
                full = self._gathered(old[-1], tensor, "construction")
                for shard, slots in itertools.groupby(old[-1].bucket.layout.slots, lambda slot: places[slot.param][0]):
                    parts = [(places[slot.param][1], slot.offset) for slot in slots]
                    with self.lost.recording(shard):
                        _fill(shard, tensor, full, parts)
            old.pop().release()
        self._batches = batches_of(self.shards[::-1], self.lost)
        self._store.use_room()  # old pages and new ones were there together
        self.raise_lost_together()

    # -- state dicts ---------------------------------------------------------------------------------------------

    def export(self) -> dict[int, dict[str, Tensor]]:
        """State by parameter index. Tensors are views of live state, or copies in host memory where the store does not
        keep it in one place. Split masters are copies."""
        self.refresh_edited()
        exported: dict[int, dict[str, Tensor]] = {}
        for shard in self.shards:
            exported |= {slot.param: {} for slot in shard.bucket.layout.slots}
            with self.lost.opened(shard) as state:
                for tensor in shard.in_state_dict:
                    values = state[tensor.name] if tensor in shard.stored else shard.values(tensor, state)
                    if not shard.keeps_views:
                        values = values.to("cpu", copy=True)
                    for number, slot in enumerate(shard.bucket.layout.slots):
                        exported[slot.param][tensor.name] = shard.shown(number, tensor, values)
        return exported

    def load(self, copies: Sequence[Copy]) -> None:
        """Carry out a planned load."""
        for shard, of_shard in itertools.groupby(copies, lambda copy: copy.shard):
            with self.lost.recording(shard), shard.opened() as state:
                for copy in of_shard:
                    shard.set_part(copy.tensor, state, copy.piece, copy.values())

    def state_pieces(self, *, stored: bool) -> Iterator[StatePiece]:
        """List what this rank holds, shard by shard: each parameter's part of every tensor, empty parts left out.
        ``stored``: of the tensors of a state dict, else of the logical ones."""
        for shard in self.shards:
            for tensor in shard.in_state_dict if stored else shard.tensors:
                yield from (StatePiece(shard, tensor, piece) for piece in shard.bucket.pieces if piece.numel)

    def values(self, *, stored: bool) -> Generator[Tensor]:
        """Give the values of each of ``state_pieces``, in their order, flat: read or write them before the next."""
        for shard, pieces in itertools.groupby(self.state_pieces(stored=stored), lambda own: own.shard):
            with self.lost.opened(shard) as state:
                for own in pieces:
                    part = shard.values(own.tensor, state, own.piece)
                    before = part._version
                    yield part
                    if own.tensor.name in shard.rule.codecs and part._version != before:
                        shard.set_part(own.tensor, state, own.piece, part)

    def restart(self, indices: set[int], only: Collection[str] | None = None) -> None:
        """Make the state of these parameters what it is at construction. ``only``: these, by name; None: all."""
        for shard, pieces in self._pieces(indices):
            with self.lost.recording(shard):
                shard.restart(pieces, only)

    # -- averages in place of the parameters -----------------------------------------------------------------------

    def set_aside(self) -> None:
        """Collective. Keep a copy of the parameters that this rank has, until ``put_back``."""
        self.refresh_edited()
        with self.sharding.world.raising_together("swap_to_ema", self.sharding.device):
            for bucket in (shard.bucket for shard in self.shards):
                with bucket.memory.opened() as parameters:
                    self._aside.append((bucket, parameters.clone()))

    def show(self, name: str) -> None:
        """Collective. Set the parameters to the average ``name``, rounded."""
        with self.sharding.world.raising_together("swap_to_ema", self.sharding.device):
            for shard in self.shards:
                with self.lost.opened(shard) as state:
                    average = next(tensor for tensor in shard.tensors if tensor.name == name)
                    shard.parameter(state).copy_(shard.values(average, state))
        self._send_out()

    def put_back(self, *, collective: bool = True) -> None:
        """Restore the parameters that were set aside. ``collective``: send them to the other ranks, too."""
        aside, self._aside = self._aside, []
        for bucket, before in aside:
            with bucket.memory.recording(), bucket.memory.opened() as shard:
                shard.copy_(before)
        if collective and aside:
            self._send_out()

    def _send_out(self) -> None:
        """Collective. Send the parameters to the other ranks. Their writes do not count as the user's edits."""
        for shard in self.shards:
            shard.bucket.unsharding.start()
        self.sharding.gather_legs.issue()
        torch.autograd.graph.increment_version([*self.parameters.values()])
        self._record_versions()

    # -- whole tensors ---------------------------------------------------------------------------------------------

    def whole_tensors(
        self, wanted: Callable[[StateTensor], bool] = lambda tensor: True
    ) -> Iterator[tuple[int, str, Tensor]]:
        """Collective. Every parameter's whole tensors of the ``wanted`` ones, by index and name.

        A tensor is valid until the next is asked for.
        """
        self.refresh_edited()
        for shard, tensor in ((of, tensor) for of in self.shards for tensor in filter(wanted, of.tensors)):
            full, flat, sharding = self._gathered(shard, tensor), shard.bucket.flat, shard.bucket.sharding
            every = gather_slices(sharding, full, "state") if flat.joined else None
            for number, (slot, own) in enumerate(zip(shard.bucket.layout.slots, flat.slices, strict=True)):
                if every is None:  # a view in the parameter's shape, else a copy that is put together of slices
                    yield slot.param, tensor.name, shard.view_in(full, tensor, number)
                else:
                    assert own is not None
                    slices = (shard.view_in(row, tensor, number, rank) for rank, row in enumerate(every))
                    yield slot.param, tensor.name, torch.cat([*slices], own.dim)
            # Where ``full`` is a copy its memory is freed now, as gloo's threads may still refer to it.
            if sharding.shard_count > 1:
                deallocate(full)
            del full, every  # before the next is gathered
        self.raise_lost_together()

    def _gathered(self, shard: ShardState, tensor: StateTensor, kind: str = "state") -> Tensor:
        """Collective. Gather a tensor of a whole bucket: a copy, unless this rank has all of it anyway."""
        _, numel = tensor.span(0, shard.bucket.layout.shard_numel)
        here = torch.zeros(0, dtype=tensor.dtype, device=self.sharding.device)
        try:
            with self.lost.opened(shard) as state:
                here = shard.values(tensor, state).to(self.sharding.device)
                if not shard.keeps_views:
                    here = here.clone()
        except OffloadError:  # the other ranks wait in the collective: the caller makes all ranks raise in the end
            here = here.new_zeros(numel)
        return whole_of(shard.bucket.sharding, here, kind)

    def distribute(self, names: Mapping[int, Collection[str]], tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Collective. Take over whole tensors from rank 0 of those that save together, one bucket at a time.

        Args:
            names: by parameter index, the names of the tensors that are given; the same on every rank.
            tensors: on rank 0, the tensors, by parameter index and name.
        """
        savers = self.sharding.savers
        for shard, tensor in ((of, tensor) for of in self.shards for tensor in of.tensors):
            flat, sharding, pieces = shard.bucket.flat, shard.bucket.sharding, shard.bucket.pieces
            given = [(n, piece) for n, piece in enumerate(pieces) if tensor.name in names.get(piece.slot.param, ())]
            if not given:
                continue
            slices, (_, numel) = sharding.slice_count if flat.joined else 1, tensor.span(0, shard.bucket.layout.numel)
            every = torch.empty(slices, numel, dtype=tensor.dtype, device=flat.device)
            for number, piece in given if savers.rank == 0 else ():
                whole, own = tensors[piece.slot.param][tensor.name], flat.slices[number]
                for rank in range(slices):
                    part = whole if own is None else own.on(rank).of(whole)
                    shard.view_in(every[rank], tensor, number, rank).copy_(part)
            # Rank 0 alone has the tensors: every slice goes to every rank.
            savers.broadcast(as_sent(every), "state")
            with self.lost.recording(shard):
                own_slice = sharding.slice_index if flat.joined else 0
                _fill(shard, tensor, every[own_slice], [(piece, piece.slot.offset) for _, piece in given])
            del every  # before the next is allocated: one whole tensor of a bucket is there at a time
        self.raise_lost_together()

    def _pieces(self, indices: set[int]) -> Iterator[tuple[ShardState, list[SlotPiece]]]:
        """Find the pieces of these parameters, by shard; shards without any are left out."""
        for shard in self.shards:
            pieces = [piece for piece in shard.bucket.pieces if piece.slot.param in indices]
            if pieces:
                yield shard, pieces

    def mark_masters_stale(self) -> None:
        """Have the next step set masters to their parameters where they do not round to them, after a load."""
        # The model may be loaded later, and a master may be older than the parameters, if another optimizer carried it.
        self.started = True
        self._versions.mark_stale()


def _fill(shard: ShardState, tensor: StateTensor, full: Tensor, parts: Sequence[tuple[SlotPiece, int]]) -> None:
    """Copy from ``full``, of a whole bucket, into pieces of a shard. Each comes with its slot's offset in ``full``."""
    with shard.opened() as state:
        for piece, offset in parts:
            source = full.narrow(0, *tensor.span(offset + piece.in_param, piece.numel))
            shard.set_part(tensor, state, piece, source)
