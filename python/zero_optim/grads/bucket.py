"""A bucket: the flat storages behind a run of parameters, and where their gradients are.

EMPTY ── collect ──> LOCAL ── launch ──┐
  └────────────── launch ──────────────┴──> REDUCED ── launch (adds) ──> REDUCED
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from ..comm.handle import Arrivals, CommBuffers, Handle, debug_options
from ..comm.sharding import Sharding
from ..comm.spans import span
from ..comm.streams import GradStreams, allocate, deallocate, keep_for_current_stream
from ..params.flat_params import FlatParams
from ..params.layout import BucketLayout
from ..params.param_shard import ArrivingParameter, arriving
from ..params.tensor_slice import is_shared, local_of
from .packing import Packing
from .slots import GradState, Shown, Slots


@dataclass
class Edits:
    """The user's edits of reduced gradients, by index of the parameter. *written*: in place."""

    assigned: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class Follower(Protocol):
    """Takes the reduced gradient elsewhere, as it arrives."""

    def reduction_launched(self, handle: Handle) -> Callable[[], object]:
        """Forget what was taken, and let a stream take the sum as it arrives, or leave that to the host. Returns what
        to call when the host has waited: it orders later work after the sum was taken, as the user may zero it."""


class Bucket:
    """The flat parameters of one dtype that are reduced together, and the buffers of their gradients.

    Attributes:
        flat: the parameters; at stage 3 those of a unit.
        keeps_full: whether gradients rest here in full: at stages 0 and 1, and on one rank.
        grad_buffer: where gradients rest, [numel] where ``keeps_full``, else [shard_numel].
        grad_shard: [shard_numel] what ``step`` applies, a view of ``grad_buffer``.
        memory: that of the part of ``flat.shard`` which this rank updates: all of it, unless the state is sharded over
            more ranks than the parameters.
        arrivals: the reductions on their way into ``grad_shard``. Whoever reads or writes it waits, or queues, there.
        slots: the state of each parameter's gradient.
        packing: packs gradients for a reduction.
        zero_copy: whether its one gradient may be reduced as it is, without packing; the same on all ranks.
        unsharding: the all-gather of the parameters after a step.
        counted_in_norm: true on exactly one of the ranks that hold the same part: a sum over ranks counts it there.
        duplicates: slots of parameters that another stage of the pipeline counts in a norm.
        follower: takes reduced gradients elsewhere; None: nobody does.
    """

    def __init__(self, layout: BucketLayout, flat: FlatParams, labels: Sequence[str], sharding: Sharding) -> None:
        self.layout, self.flat, self.sharding = layout, flat, sharding
        self.params = flat.params
        self._labels = labels
        self.dtype, self.device = flat.dtype, flat.device
        self.reduce_dtype = sharding.reduce_dtype(self.dtype)
        self.pieces = flat.pieces if layout is flat.layout else tuple(layout.pieces(sharding.shard_index))
        grid, numel = sharding.grid, layout.shard_numel
        parted = grid is not None and flat.shard.numel() != numel
        self.memory = flat.memory.part(grid.across.rank, numel) if grid is not None and parted else flat.memory
        self.counted_in_norm = sharding.counted_in_norm(cut=flat.cut)
        self.duplicates = {index for index, p in enumerate(self.params) if is_shared(p)}
        self.arrivals = Arrivals()
        self._writes_known = 0  # the count of the user's writes into gradients as ``note_writes`` was last called
        self.unsharding = Unsharding(layout, flat, labels, sharding)
        self.follower: Follower | None = None
        self.slots = Slots(self.params)
        self.packing = Packing(layout, flat, labels, sharding)
        # Without a grid the shard group's reduce-scatter is the whole reduction: one call less on the way to it.
        whole = sharding.grid is None and sharding.shard_count > 1
        self._reduce = sharding.data_parallel.reduce_scatter if whole else sharding.reduce
        self.keeps_full = sharding.keeps_full_gradients
        self._allocate_gradients()
        self.zero_copy = self._may_be_zero_copy()

    def gradient_to_apply(self) -> Tensor:
        """Return ``grad_shard``. At stage 3, where no gradient has come, it is zeros in new memory."""
        # There the memory is freed while there is no gradient, and without a round nothing takes it again.
        if self.flat.sharded and self.grad_buffer.untyped_storage().nbytes() == 0:
            allocate(self.grad_buffer).zero_()
        return self.grad_shard

    @property
    def state(self) -> GradState:
        return self.slots.bucket_state

    def _allocate_gradients(self) -> None:
        numel = self.layout.numel if self.keeps_full else self.layout.shard_numel
        dtype = self.sharding.grad_dtype(self.dtype)
        self.grad_buffer = buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self.grad_shard = self.sharding.own_part(buffer) if self.keeps_full else buffer
        self.shown = Shown(buffer, self.grad_shard, self.flat, self.pieces, self._labels, self.sharding, self.arrivals)
        self._are_terms: set[int] = set()
        if self.flat.sharded:
            deallocate(self.grad_buffer)

    def _use_new_memory_if_kept(self) -> None:
        """Allocate new memory where the user keeps a gradient that is about to be overwritten."""
        # A client that keeps ``p.grad`` over ``zero_grad`` would see the next step's values in it.
        if self.shown.kept():
            self.arrivals.wait()
            self._allocate_gradients()

    def __str__(self) -> str:
        return _name(self.layout, self._labels)

    def label(self, index: int) -> str:
        return self._labels[self.layout.slots[index].param]

    # -- another layout --------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Make memory for reduced gradients of other buckets: zeros until ``take_over``."""
        allocate(self.grad_buffer).zero_()
        self.slots.make_room()

    def take_over(self, index: int, whole: Tensor, *, shown: bool, used: bool) -> None:
        """Copy this rank's part of ``whole`` into slot ``index``."""
        piece, part = self.pieces[index], self._part_of(index)
        part.copy_(whole if self.sharding.shard_count == 1 else whole[piece.in_param :][: len(part)])
        self.slots.take_over(index, self.shown.reduced()[index] if shown else None, used=used)

    def release_parameters(self) -> None:
        """Drop the parameters' memory, which goes as they move to other buckets. Reduced gradients stay until then."""
        keep_for_current_stream(self.flat.full, self.grad_buffer)
        # ``unsharding`` stays: where new buckets cannot be made, forwards still ask whether a gather is in flight.
        del self.flat, self.packing, self.unsharding._flat
        if self.state is not GradState.REDUCED:
            del self.grad_buffer, self.grad_shard, self.shown

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def can_collect(self) -> bool:
        """True if this rank's own gradients can wait in ``grad_buffer``, readable through ``.grad``."""
        return bool(self.shown.full) and self.state is not GradState.REDUCED and not self.arrivals.in_flight

    def collect(self, streams: GradStreams) -> bool:
        """Move this rank's gradients into ``grad_buffer``, unscaled; every ``.grad`` becomes a view of it.

        Returns whether anything had changed since the last time.
        """
        streams.join()
        found = self.slots.scan(self.handles())
        # Everything is in ``grad_buffer`` already: to pack it again would only read and write it.
        if not found.local and not found.gone:
            return False
        self._use_new_memory_if_kept()
        # In LOCAL those collected before are packed again, each from its own slot: ``pack`` zeroes what is absent.
        sources = found.local if self.state is GradState.EMPTY else _present(self.params)
        allocate(self.grad_buffer)
        sources, terms = self.packing.pack(sources, self.grad_buffer, 1.0)
        if self.sharding.reduces:
            self._are_terms = {*terms}
        else:  # nothing leaves
            self.packing.sum_terms(terms, self.grad_buffer)
        streams.keep(grad for _, grad in sources)
        self.slots.collect(sources, self.shown.local(self._are_terms))
        return True

    def launch(self, buffers: CommBuffers, streams: GradStreams, *, may_wait: bool) -> None:
        """Pack this rank's gradients, scaled by 1/N, and start their reduction; it adds to one that is there.

        Args:
            buffers: lend the memory to pack into and to receive in.
            streams: on which the gradients were added up.
            may_wait: whether the host may wait for the last reduction into this bucket, and for memory that another
                reduction has. Otherwise it packs into memory of its own, and adds when the sum arrives.
        """
        streams.join()
        if may_wait:
            self.arrivals.wait()
        found = self.slots.scan(self.handles())
        self.drop_zeroed(found.zeroed)
        accumulate = self.state is GradState.REDUCED and len(self.slots.stale) < len(self.params)
        # Three cases. Some average stays: the rest is dropped, and the new sum added to it. Or no average stays, but an
        # old sum is on its way, and would arrive over the new one: it is zeroed as it arrives, and the new one added.
        # Or nothing is there: the new sum takes the memory, unless somebody keeps a gradient in it.
        if accumulate:
            self._drop_stale()
        elif self.arrivals.in_flight:  # nothing is wanted of what arrives
            self.arrivals.then(self.grad_shard.zero_)
            accumulate = True
        else:
            self._use_new_memory_if_kept()
        sources = _present(self.params) if self.state is GradState.LOCAL else found.local
        lent: list[Tensor] = []

        def lend(numel: int) -> Tensor:
            lent.append(buffers.take(self.arrivals, numel, self.reduce_dtype, may_wait=may_wait))
            return lent[-1]

        # Where an average stays in ``grad_buffer``, or its dtype is not what is communicated, other memory is needed.
        in_place = self.keeps_full and self.grad_buffer.dtype == self.reduce_dtype and not accumulate
        # Divided by N as it is packed, or as the sum arrives: on every rank alike.
        pack_scale, sum_scale = self.sharding.grad_scale, 1.0
        if self.zero_copy:
            pack_scale, sum_scale = sum_scale, pack_scale
        unpacked = self.zero_copy and not accumulate and self.packing.is_packed(sources)
        if unpacked:
            lend(0)  # waits as long as for a buffer, so that no more gradients are in flight
            full = sources[0][1].detach().view(-1)
            self.packing.nonfinite.zero_()  # the update marks what is not finite in this rank's shard
        else:
            if in_place:  # a unit on one data-parallel rank, with parameters on the host, may have freed it
                allocate(self.grad_buffer)
            full = self.grad_buffer if in_place else lend(self.layout.numel)
            with span("pack", self):
                sources, terms = self.packing.pack(sources, full, pack_scale, accumulate)
            self.packing.sum_all_terms(terms, sources, full)
        self.slots.launch(sources, self.shown.reduced())
        streams.keep(grad for _, grad in sources)
        del sources, found  # what was packed goes before memory is taken to receive into
        allocate(self.grad_buffer)
        with span("reduce_scatter", self):
            handle = self._reduce(full, self.grad_shard, lend, accumulate=accumulate, scale=sum_scale)
        if (follower := self.follower) is not None:
            # On a GPU a stream beside this one takes the sum as it arrives. Else the host does, when it has waited.
            on_arrival = follower.reduction_launched(handle)
        if unpacked:
            handle.then(partial(keep_for_current_stream, full))  # lives until then, and nowhere else
        for buffer in lent:
            handle.then(partial(buffers.give_back, buffer))
        # Reduced in place, the rest was communicated, too. At stage 0 every rank has the average of all of it.
        if in_place and buffers.poison and self.sharding.stage >= 1:
            handle.then(partial(_poison_beside, self.grad_shard, self.grad_buffer))
        if follower is not None:
            handle.then(on_arrival)
        self.arrivals.expect(handle)
        self.note_writes()

    def _may_be_zero_copy(self) -> bool:
        # The sum is divided as it arrives, also where this rank has to pack: the others may not. The bits are those of
        # gradients that are divided as they are packed, as dividing by a power of two rounds nothing. In fp16 the sum
        # might overflow.
        slots, flat, scale = self.layout.slots, self.flat, self.sharding.grad_scale
        alone = len(slots) == 1 and slots[0].numel == self.layout.numel
        scatters = self.sharding.grid is None and not self.keeps_full
        dtypes = {self.sharding.local_dtype(self.dtype), self.reduce_dtype, self.grad_buffer.dtype}
        exact = math.frexp(scale)[0] == 0.5 and len(dtypes) == 1 and self.reduce_dtype != torch.float16
        return alone and scatters and exact and not (flat.permuted or flat.sliced or self.sharding.of_plain_slices)

    def note_writes(self) -> None:
        """Record that all writes into the gradients so far are known, or were not the user's."""
        self._writes_known = self.shown.writes()

    @property
    def written(self) -> bool:
        """True if the user has written into gradients, in place, since ``note_writes``."""
        return self.shown.writes() != self._writes_known

    def counted(self) -> list[Tensor]:
        """List the parts of ``grad_shard`` that this rank counts in a norm: as a rule all of it. Gaps are zero."""
        if not self.counted_in_norm:
            return []
        if not self.duplicates:
            return [self.grad_shard]
        return [self._part_of(i) for i, piece in enumerate(self.pieces) if piece.numel and i not in self.duplicates]

    def counted_elsewhere(self) -> list[Tensor]:
        """List the parts that another stage of the pipeline, or another tensor-parallel rank, counts in a norm."""
        # Its own should be the same, but was reduced separately. So whether this rank's is finite is checked here, too.
        if self.counted_in_norm:
            return [self._part_of(index) for index in self.duplicates if self.pieces[index].numel]
        return [self.grad_shard] if self.sharding.counted_in_norm(cut=True) else []

    # -- what the user does to gradients ---------------------------------------------------------------------------

    def follow_edits(self, edits: Edits) -> None:
        """Drop what the user has zeroed since the last reduction. Adds the gradients assigned since, and dropped."""
        found = self.slots.scan(self.handles())
        # Gradients that were zeroed are zeroed in ``grad_shard``, too, which has to have arrived for that.
        if self.state is GradState.REDUCED:
            self.arrivals.wait()
            self.drop_zeroed(found.zeroed)
            self._drop_stale()
        assigned = _present(self.params) if self.state is GradState.LOCAL else found.local
        slots = self.layout.slots
        edits.assigned.update(slots[index].param for index, _ in assigned)
        edits.dropped.update(slots[index].param for index in found.gone)

    def abandon(self) -> None:
        """Wait for nothing any more: ranks are out of sync, or the optimizer is closed on this rank alone."""
        # At stage 3 ``clear`` frees memory. A reduction in flight keeps the memory that it writes into.
        if self.flat.sharded and self.arrivals.in_flight:
            self._allocate_gradients()
        self.arrivals.abandon()
        self.unsharding.end()

    def clear(self) -> None:
        """Drop every gradient; at stage 3 their memory, too."""
        self.slots.clear()
        if self.flat.sharded:
            self.leave_memory()
            deallocate(self.grad_buffer)

    def leave_memory(self) -> None:
        """Make ``grad_buffer`` memory that no reduction writes and no user keeps, before it is freed."""
        # A reduction may still write into it: memory that is freed under one is another tensor's soon.
        self.arrivals.wait()
        self._use_new_memory_if_kept()

    def zero(self, unless: Tensor | None = None) -> None:
        """Make every gradient zero, as ``zero_grad(set_to_none=False)`` means. ``unless``: [] bool on the device, True
        where nothing is to be done."""
        if self.state is not GradState.EMPTY:
            # With averages the rest of ``grad_buffer`` means nothing, and a collective may still read it.
            buffer = self.grad_shard if self.state is GradState.REDUCED else self.grad_buffer
            self.arrivals.then(buffer.zero_ if unless is None else partial(_keep_where, buffer, unless))
        for _, grad in self.slots.scan(self.handles()).local if unless is None else ():
            local_of(grad).detach_().zero_()

    def handles(self) -> Sequence[Tensor | None]:
        """List what each ``.grad`` is while the bucket holds the slot's gradient."""
        if self.state is GradState.EMPTY:
            return [None] * len(self.params)
        return self.shown.local(self._are_terms) if self.state is GradState.LOCAL else self.shown.reduced()

    def _drop_stale(self) -> None:
        """Take stale slots out of ``grad_shard``."""
        if stale := self.slots.stale:
            # One kernel where all of it goes, as after ``module.zero_grad()``; else one for each slot.
            whole = len(stale) == len(self.params)
            for part in [self.grad_shard] if whole else map(self._part_of, stale):
                self.arrivals.then(part.zero_)

    def drop_zeroed(self, zeroed: Sequence[tuple[int, Tensor]]) -> None:
        """Zero the averages of local gradients that were zeroed in place: ``.grad`` did not show them."""
        for index, grad in zeroed:
            # Whether it is zero is asked on the device: no host sync.
            self.arrivals.then(partial(_keep_where, self._part_of(index), local_of(grad).detach().ne(0).any()))

    def _part_of(self, index: int) -> Tensor:
        """This rank's part of a slot's reduced gradient, flat."""
        piece = self.pieces[index]
        return self.grad_shard.narrow(0, piece.in_shard, piece.numel)


class Unsharding:
    """The all-gather of a bucket's parameters after a step, and who waits for it.

    Attributes:
        pending: the all-gather while it is in flight, else None.
    """

    def __init__(self, layout: BucketLayout, flat: FlatParams, labels: Sequence[str], sharding: Sharding) -> None:
        self._layout, self._flat, self._labels, self._sharding = layout, flat, labels, sharding
        self.pending: Handle | None = None
        self._guarded: list[Tensor] = []
        self._stepped_on: torch.cuda.Stream | None = None
        self._reading = threading.RLock()  # other threads may read parameters that are in flight
        self._poison = "poison" in debug_options() and sharding.shard_count > 1

    def __str__(self) -> str:
        return _name(self._layout, self._labels)

    def start(self) -> None:
        """Start the all-gather, at stages 1 and 2. At stage 3 a unit gathers when it is called; before that, with state
        over all ranks, its shard comes together."""
        flat, grid = self._flat, self._sharding.grid
        if self._sharding.stage == 3 and grid is not None and grid.over_all:
            if self._poison:
                _poison_beside(grid.across.own_part(flat.shard), flat.shard)
            with span("step.all_gather", self):
                self.pending = flat.complete_shard(self._sharding.gather_across)
        elif self._sharding.stage < 3 and self._sharding.shard_count > 1:
            if self._poison:
                _poison_beside(flat.shard, flat.full)
            with span("step.all_gather", self):
                self.pending = self._sharding.all_gather(flat.full, own=flat.shard)

    def guard(self) -> None:
        """Let the first read or write of a parameter that is in flight wait for it: see ``ArrivingParameter``."""
        if self.pending is not None:
            device = self._flat.device
            self._guarded = [parameter for parameter in self._flat.params if type(parameter) is nn.Parameter]
            self._stepped_on = torch.cuda.current_stream(device) if device.type == "cuda" else None
            for parameter in self._guarded:
                arriving[id(parameter)] = self
                parameter.__class__ = ArrivingParameter

    def wait(self) -> None:
        """Order later work on the current stream after the arrival of the parameters."""
        if self.pending is not None:
            with self._reading:
                if self.pending is not None:  # another thread may have waited meanwhile
                    self.pending.wait()
                    self.end()

    def order_reader(self) -> None:
        """Do the same for whoever reads or writes a parameter, on any stream, in any thread."""
        with self._reading:
            on = self._stepped_on
            if self.pending is None or on is None or on == torch.cuda.current_stream(self._flat.device):
                self.wait()
            else:
                self.pending.order_current()
                with torch.cuda.stream(on):  # that waits, too: the next forward, on it, does not wait again
                    self.wait()

    def end(self) -> None:
        """Make the parameters plain ones again: they have arrived, or nobody waits for them any more."""
        for parameter in self._guarded:
            parameter.__class__ = nn.Parameter
            arriving.pop(id(parameter), None)
        self._guarded = []
        self.pending = None


def _name(layout: BucketLayout, labels: Sequence[str]) -> str:
    first, *others = layout.slots
    return f"{labels[first.param]} and {len(others)} more" if others else labels[first.param]


def _present(params: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    return [(index, p.grad) for index, p in enumerate(params) if p.grad is not None]


def _poison_beside(shard: Tensor, full: Tensor) -> None:
    """Fill ``full`` with NaN beside ``shard``, a view of it."""
    kept = shard.clone()
    full.fill_(torch.nan)
    shard.copy_(kept)


def _keep_where(tensor: Tensor, keep: Tensor) -> None:
    tensor.copy_(torch.where(keep, tensor, torch.zeros_like(tensor)))
    keep_for_current_stream(keep)  # it may be of the stream on which it was decided
