"""A bucket: the flat storages behind a run of parameters, and where their gradients are.

EMPTY ── collect ──> LOCAL ── launch ──┐
  └────────────── launch ──────────────┴──> REDUCED ── launch (adds) ──> REDUCED
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

import zero_kernels

from ..comm.arrivals import Arrivals
from ..comm.buffers import CommBuffers, debug_options
from ..comm.chain import Chain
from ..comm.collectives import Pending
from ..comm.sharding import Sharding
from ..comm.spans import span
from ..comm.storage import allocate, deallocate
from ..comm.streams import GradStreams, keep_for_current_stream
from ..errors import GradientError
from ..params.flat_params import FlatParams
from ..params.flat_shard import FlatShard
from ..params.layout import BucketLayout, Slot
from ..params.marks import is_shared, is_term
from ..params.param_shard import ArrivingParameter, arriving
from ..params.storage_order import as_stored
from ..params.tensor_slice import local_gradient, local_of, shown_as
from .handed_out import HandedOut
from .slots import GradState, Slots, Zeroed

_dtype_of, _layout_of = operator.attrgetter("dtype"), operator.attrgetter("layout")
_version_of = operator.attrgetter("_version")
_STRIDED = {torch.strided}


class Flight:
    """A reduction under way, and the buffers that it was lent."""

    def __init__(
        self, pending: Pending | Chain, buffers: CommBuffers, lent: Sequence[Tensor], then: Sequence[Callable[[], None]]
    ) -> None:
        self.pending, self._buffers, self._lent, self._then = pending, buffers, lent, then

    def wait(self) -> None:
        self.pending.wait()
        for buffer in self._lent:
            self._buffers.give_back(buffer)
        self._lent = ()
        for act in self._then:
            act()
        self._then = ()

    def arrives_within(self, seconds: float) -> bool:
        return self.pending.arrives_within(seconds)


@dataclass
class Edits:
    """The user's edits of reduced gradients, by index of the parameter: another one assigned, dropped, or written in
    place."""

    assigned: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class Follower(Protocol):
    """Takes the reduced gradient elsewhere, as it arrives."""

    def reduction_begins(self) -> None:
        """Forget what was taken: the shard is about to be written."""

    def reduction_launched(self, pending: Pending | Chain) -> bool:
        """Arrange, without waiting, that the sum is taken as it arrives. Returns whether that was possible."""

    def reduction_arrived(self) -> None:
        """Take the sum, which is there, where ``reduction_launched`` could not; later work comes after that."""

    def after_taking(self) -> None:
        """Order later work after the sum was taken: the user may zero it."""


@dataclass(frozen=True)
class Moving:
    """A bucket's reduced gradients on their way to other buckets.

    Attributes:
        held: [shard_numel] this rank's part; or [numel] the whole, where this rank has it.
        shown: of each slot, whether ``.grad`` shows it, and not what the user has put there since.
        used: of each slot, whether this rank had a part in it.
    """

    layout: BucketLayout
    sharding: Sharding
    held: Tensor
    shown: Sequence[bool]
    used: bytes

    def whole(self) -> Iterator[tuple[Slot, Tensor, bool, bool]]:
        """Collective. Yield for every slot its whole gradient, flat; whether it is shown, and used."""
        full = self.sharding.whole_of(self.held, "construction")
        for slot, shown, used in zip(self.layout.slots, self.shown, self.used, strict=True):
            yield slot, full.narrow(0, slot.offset, slot.numel), shown, bool(used)


class Bucket:
    """The flat parameters of one dtype that are reduced together, and the buffers of their gradients.

    Attributes:
        flat: the parameters; at stage 3 those of a unit.
        param_shard: [shard_numel] this rank's part of them.
        keeps_full: whether gradients rest here in full: at stages 0 and 1, and on one rank.
        grad_buffer: where gradients rest, [numel] where ``keeps_full``, else [shard_numel].
        grad_shard: [shard_numel] what ``step`` applies, a view of ``grad_buffer``.
        arrivals: the reductions on their way into ``grad_shard``. Whoever reads or writes it waits, or queues, there.
        slots: the state of each parameter's gradient.
        offsets: where each slot starts, in elements.
        nonfinite: [slots] int32, 1 where the gradient that this rank last packed was not finite; ``Buckets`` gives it.
        speaks: whether this rank's part counts in a sum over ranks: of ranks that hold the same, one counts it.
        terms: slots whose gradients, in any reduction until now, were terms of a sum over the tensor-parallel ranks.
        shared: slots of parameters that another stage of the pipeline counts in a norm.
        follower: takes reduced gradients elsewhere; None: nobody does.
        unsharding: the all-gather of the parameters after a step, while it is under way.
    """

    def __init__(self, layout: BucketLayout, flat: FlatParams, labels: Sequence[str], sharding: Sharding) -> None:
        self.layout, self.flat, self.sharding = layout, flat, sharding
        self.params = flat.params
        self._labels = labels
        self.dtype, self.device = flat.dtype, flat.device
        self.reduce_dtype = sharding.reduce_dtype(self.dtype)
        self.pieces = flat.pieces if layout is flat.layout else tuple(layout.pieces(sharding.shard_index))
        self.offsets = [slot.offset for slot in layout.slots]
        self.nonfinite = torch.zeros(len(self.params), dtype=torch.int32, device=self.device)
        self._absent = torch.empty(0, dtype=self.dtype, device=self.device)  # ``pack`` takes it for a missing gradient
        self.speaks = sharding.speaks(cut=flat.cut)
        self.shared = {index for index, p in enumerate(self.params) if is_shared(p)}
        self.terms: set[int] = set()
        self._marked_terms = [i for i, p in enumerate(self.params) if sharding.of_plain_slices and is_term(p)]
        self._dtypes = {self.dtype}  # the one dtype that gradients may have; a set, as ``pack`` compares sets
        self._pack_op = zero_kernels.Prepared("pack")
        self.arrivals = Arrivals()
        self._zeroings = 0  # how often the user had zeroed gradients here as the last reduction left
        self._zeroings_noted = 0  # the same, as ``note_writes`` was last called
        self.unsharding: Pending | None = None
        self._guarded: list[Tensor] = []
        self._stepped_on: torch.cuda.Stream | None = None
        self._reading = threading.RLock()  # other threads may read parameters that are in flight
        self._poison = "poison" in debug_options() and sharding.shard_count > 1
        self.follower: Follower | None = None
        self.slots = Slots(self.params)
        self._allocate_gradients()

    @property
    def param_shard(self) -> Tensor:
        return self.flat.shard

    def gradient_to_apply(self) -> Tensor:
        """Return ``grad_shard``. At stage 3, where no gradient has come, it is zeros in new memory."""
        # At stage 3 the memory is freed while there is no gradient. Without a round nothing takes it again.
        if self.flat.sharded and self.grad_buffer.untyped_storage().nbytes() == 0:
            allocate(self.grad_buffer)
            self.grad_buffer.zero_()
        return self.grad_shard

    @property
    def state(self) -> GradState:
        return self.slots.bucket_state

    def _allocate_gradients(self) -> None:
        stage, reduces = self.sharding.stage, self.sharding.reduces
        self.keeps_full = self.sharding.keeps_full_gradients
        numel = self.layout.numel if self.keeps_full else self.layout.shard_numel
        dtype = self.sharding.grad_dtype(self.dtype)
        self.grad_buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self.grad_shard = self.sharding.own_part(self.grad_buffer) if self.keeps_full else self.grad_buffer
        self._views: Sequence[Tensor] = ()
        # ``.grad`` can show a view only in the parameter's own dtype: torch takes no other.
        if self.keeps_full and dtype == self.dtype:
            self._views = self.flat.slot_views(self.grad_buffer)
            if self.flat.sliced:
                self._views = [*map(shown_as, self.params, self._views)]
        # Where all tensor-parallel ranks have a parameter, each may have a term of its gradient, summed as it leaves.
        self._terms: Sequence[Tensor] = ()
        if reduces and self.flat.sliced and not self.flat.cut:
            pairs = zip(self.params, self._views, strict=False)
            self._terms = [shown_as(parameter, local_of(view), term=True) for parameter, view in pairs]
        self._are_terms: set[int] = set()
        self._shards: Sequence[FlatShard] = ()
        # From stage 1 on the average is there for this rank's shard alone, so ``.grad`` must not look whole.
        if stage >= 1 and reduces:
            self._shards = self.shard_views(self.grad_shard, "gradient", self.dtype)
        held = [shard.local for shard in self._shards] if self.flat.sharded else []
        within = [*map(local_of, self._views)] if self.flat.sliced else []
        for shard in self._shards:
            shard.arrivals = self.arrivals
        handed_out = ((self._views, within), (self._terms, ()), (self._shards, held))
        self._handed_out = [HandedOut(self.grad_buffer, handles, of_them) for handles, of_them in handed_out]
        if self.flat.sharded:
            deallocate(self.grad_buffer)

    def _use_new_memory_if_kept(self) -> None:
        """Allocate new memory where the user keeps a gradient that is about to be overwritten."""
        # A client that keeps ``p.grad`` over ``zero_grad`` would see the next step's values in it.
        if any(handed_out.kept(self.params) for handed_out in self._handed_out):
            self.arrivals.wait()
            self._allocate_gradients()

    def __str__(self) -> str:
        """Its name in a trace."""
        more = f" and {len(self.params) - 1} more" if len(self.params) > 1 else ""
        return f"{self.label(0)}{more}"

    def label(self, index: int) -> str:
        return self._labels[self.layout.slots[index].param]

    def relabel(self) -> None:
        for index, shard in enumerate(self._shards):
            shard.label = f"gradient of {self.label(index)}"

    def shard_views(self, shard: Tensor, what: str, dtype: torch.dtype | None = None) -> list[FlatShard]:
        """Make a ``FlatShard`` a slot over ``shard`` [shard_numel]. ``dtype``: that it shows; None: the shard's."""
        return [
            FlatShard(
                shard.narrow(0, piece.in_shard, piece.numel),
                piece.in_param,
                parameter.shape,
                f"{what} of {self.label(index)}",
                dtype,
                self.flat.orders[index],
                self.flat.slices[index],
            )
            for index, (piece, parameter) in enumerate(zip(self.pieces, self.params, strict=True))
        ]

    # -- another layout --------------------------------------------------------------------------------------------

    def moving(self) -> Moving:
        shown = [p.grad is handle for p, handle in zip(self.params, self._reduced_handles(), strict=True)]
        held = self.grad_shard if self.sharding.shard_count > 1 else self.grad_buffer
        return Moving(self.layout, self.sharding, held, shown, bytes(self.slots.used))

    def make_room(self) -> None:
        """Make memory for reduced gradients that other buckets have held: zeros until ``take_over``."""
        allocate(self.grad_buffer)
        self.grad_buffer.zero_()
        self.slots.make_room()

    def take_over(self, index: int, whole: Tensor, *, shown: bool, used: bool) -> None:
        """Copy this rank's part of ``whole`` into slot ``index``."""
        piece, part = self.pieces[index], self._part_of(index)
        part.copy_(whole if self.sharding.shard_count == 1 else whole[piece.in_param :][: len(part)])
        self.slots.take_over(index, self._reduced_handles()[index] if shown else None, used=used)

    def let_go(self) -> None:
        """Drop parameters and gradients: their memory goes as the parameters move to other buckets."""
        keep_for_current_stream(self.flat.full, self.grad_buffer)
        del self.flat, self.params, self.slots
        del self.grad_buffer, self.grad_shard, self._views, self._terms, self._shards, self._handed_out

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def can_collect(self) -> bool:
        """True if this rank's own gradients can wait in ``grad_buffer``, readable through ``.grad``."""
        return bool(self._views) and self.state is not GradState.REDUCED and not self.arrivals.under_way

    def before_accumulate(self, index: int) -> None:
        """Take a reduced gradient out of slot ``index``'s ``.grad``, to which autograd is about to add."""
        if self.slots.bucket_state is not GradState.REDUCED:
            return
        written = self.slots.accumulate(index, self._reduced_handles()[index])
        if written and (grad := self.params[index].grad) is not None:
            self._drop_zeroed([(index, grad)])

    def collect(self, streams: GradStreams) -> bool:
        """Move this rank's gradients into ``grad_buffer``, unscaled; every ``.grad`` becomes a view of it.

        Returns whether anything had changed since the last time.
        """
        streams.join()
        found = self.slots.scan(self._handles())
        # Everything is in ``grad_buffer`` already: to pack it again would only read and write it.
        if not found.local and not found.gone:
            return False
        self._use_new_memory_if_kept()
        # In LOCAL those collected before are packed again, each from its own slot: ``pack`` zeroes what is absent.
        sources = found.local if self.state is GradState.EMPTY else self._present()
        allocate(self.grad_buffer)
        sources, terms = self._of_this_rank(sources)
        self.pack(sources, self.grad_buffer, 1.0)
        if self.sharding.reduces:
            self._are_terms = {*terms}
        else:  # nothing leaves
            self._sum_terms(terms, self.grad_buffer)
        streams.keep(grad for _, grad in sources)
        self.slots.collect(sources, self._local_views)
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
        found = self.slots.scan(self._handles())
        self._drop_zeroed(found.zeroed)
        accumulate = self.state is GradState.REDUCED and len(self.slots.stale) < len(self.params)
        # Three cases. Some average stays: the rest is dropped, and the new sum added to it. Or no average stays, but an
        # old sum is on its way, and would arrive over the new one: it is zeroed as it arrives, and the new one added.
        # Or nothing is there: the new sum takes the memory, unless somebody keeps a gradient in it.
        if accumulate:
            self._drop_stale()
        elif self.arrivals.under_way:  # nothing is wanted of what arrives
            self.arrivals.then(partial(_zero, self.grad_shard))
            accumulate = True
        else:
            self._use_new_memory_if_kept()
        sources = self._present() if self.state is GradState.LOCAL else found.local
        lent: list[Tensor] = []

        def lend(numel: int) -> Tensor:
            lent.append(buffers.take(self, numel, self.reduce_dtype, may_wait=may_wait))
            return lent[-1]

        # Where an average stays in ``grad_buffer``, or its dtype is not what is communicated, other memory is needed.
        in_place = self.keeps_full and self.grad_buffer.dtype == self.reduce_dtype and not accumulate
        if in_place:  # a unit on one data-parallel rank, with parameters on the host, may have freed it
            allocate(self.grad_buffer)
        full = self.grad_buffer if in_place else lend(self.layout.numel)
        sources, terms = self._of_this_rank(sources)
        with span("pack", self):
            self.pack(sources, full, self.sharding.grad_scale, accumulate)
        self._sum_terms([*self._with_dropped(terms, sources), *self._marked_terms], full)
        self.slots.launch(sources, self._reduced_handles())
        streams.keep(grad for _, grad in sources)
        del sources, found  # what was packed goes before memory is taken to receive into
        allocate(self.grad_buffer)
        # With state on the host, what was copied there of this shard is about to be out of date.
        if self.follower is not None:
            self.follower.reduction_begins()
        with span("reduce_scatter", self):
            pending = self.sharding.reduce(full, self.grad_shard, lend, accumulate=accumulate)
        self._zeroings = self._zeroings_now()  # what is zeroed from here on is meant for this sum
        then = [self._poison_others] if in_place and buffers.poison else []
        if (follower := self.follower) is not None:
            # On a GPU a stream beside this one takes the sum as it arrives. Else the host does, when it has waited.
            taken = follower.reduction_launched(pending)
            then.append(follower.after_taking if taken else follower.reduction_arrived)
        self.arrivals.expect(Flight(pending, buffers, lent, then))

    def zeroed_since_launch(self) -> Zeroed | None:
        """Find how the user has zeroed every gradient of this bucket since it left; None: not all of them."""
        if all(parameter.grad is None for parameter in self.params):
            return Zeroed.TO_NONE
        return Zeroed.IN_PLACE if self._zeroings_now() - self._zeroings >= len(self.params) else None

    def note_writes(self) -> None:
        """Note that all writes into the gradients so far are known, or were not the user's."""
        self._zeroings_noted = self._zeroings_now()

    @property
    def written(self) -> bool:
        """True if the user has written into gradients, in place, since ``note_writes``."""
        return self._zeroings_now() != self._zeroings_noted

    def _zeroings_now(self) -> int:
        if self._shards:
            return self.arrivals.zeroed
        # A write through a DTensor shows only in its own version counter.
        shown = (*self._views, *self._terms)
        return sum(map(_version_of, shown)) if self.flat.sliced else self.grad_buffer._version

    def drop_all(self, how: Zeroed) -> None:
        """Drop or zero all gradients, as the user has, though no ``.grad`` shows it."""
        if how is Zeroed.TO_NONE:
            self.slots.drop(range(len(self.params)))
        else:
            self.arrivals.then(partial(_zero, self.grad_shard))

    def keep_where(self, keep: Tensor) -> None:
        """Zero all gradients if ``keep``, [] bool on the device, is False."""
        self.arrivals.then(partial(_keep_where, self.grad_shard, keep))

    def launch_zeros(self) -> None:
        """Take part in the others' reduction with zeros, and drop the sum.

        Their backward launched it. Ours raised before its first gradient, and all ranks have zeroed since.
        """
        full = torch.zeros(self.layout.numel, dtype=self.reduce_dtype, device=self.device)
        self._sum_terms(self._marked_terms, full)
        out = full if self.sharding.shard_count == 1 else full.new_empty(self.layout.shard_numel)
        self.sharding.reduce(full, out, full.new_empty, accumulate=False).wait()

    def wait(self) -> None:
        """Order later work after the arrival of every reduction."""
        self.arrivals.wait()

    def arrives_within(self, seconds: float) -> bool:
        """True if every reduction arrives within ``seconds``. On CUDA the host need not know."""
        return self.arrivals.arrive_within(seconds)

    def _poison_others(self) -> None:
        """Fill ``grad_buffer`` with NaN beside this rank's shard: reduced in place, the rest was communicated, too."""
        # At stage 0 every rank has the average of all of it.
        if self.sharding.stage >= 1:
            _poison_beside(self.grad_shard, self.grad_buffer)

    def counted(self) -> list[Tensor]:
        """List the parts of ``grad_shard`` that this rank counts in a norm: as a rule all of it. Gaps are zero."""
        if not self.speaks:
            return []
        return self._parts({*range(len(self.params))} - self.shared) if self.shared else [self.grad_shard]

    def counted_elsewhere(self) -> list[Tensor]:
        """List the parts that another stage of the pipeline, or another tensor-parallel rank, counts in a norm. Its own
        should be the same, but was reduced separately. So whether this rank's is finite is checked here, too."""
        if self.speaks:
            return self._parts(self.shared)
        return [self.grad_shard] if self.sharding.speaks(cut=True) else []

    def _parts(self, indices: Iterable[int]) -> list[Tensor]:
        return [self._part_of(index) for index in indices if self.pieces[index].numel]

    # -- parameters ------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start the all-gather of the parameters. At stage 3 units are gathered as they are used."""
        # At stage 3 a unit gathers them when it is called.
        if self.sharding.stage < 3 and self.sharding.shard_count > 1:
            if self._poison:
                _poison_beside(self.flat.shard, self.flat.full)
            with span("step.all_gather", self):
                self.unsharding = self.sharding.all_gather(self.flat.full, own=self.flat.shard)

    def guard(self) -> None:
        """Let the first read or write of a parameter that is in flight wait for it: see ``ArrivingParameter``."""
        if self.unsharding is not None:
            self._guarded = [parameter for parameter in self.params if type(parameter) is nn.Parameter]
            self._stepped_on = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
            for parameter in self._guarded:
                arriving[id(parameter)] = self
                parameter.__class__ = ArrivingParameter

    def wait_for_parameters(self) -> None:
        """Order later work on the current stream after the arrival of the parameters."""
        if self.unsharding is not None:
            with self._reading:
                if self.unsharding is not None:  # else another thread has waited meanwhile
                    self.unsharding.wait()
                    self._end_unsharding()

    def order_reader(self) -> None:
        """Do the same for whoever reads or writes a parameter, on any stream, in any thread. The stream that has
        stepped waits, too: the next forward, on that one, does not wait again."""
        with self._reading:
            on = self._stepped_on
            if self.unsharding is None or on is None or on == torch.cuda.current_stream(self.device):
                self.wait_for_parameters()
            else:
                self.unsharding.order_current()
                with torch.cuda.stream(on):
                    self.wait_for_parameters()

    def _end_unsharding(self) -> None:
        for parameter in self._guarded:
            parameter.__class__ = nn.Parameter
            arriving.pop(id(parameter), None)
        self._guarded = []
        self.unsharding = None

    def follow_edits(self) -> Edits:
        """Drop what the user has zeroed since the last reduction. Returns the gradients assigned since, and dropped."""
        found = self.slots.scan(self._handles())
        # Gradients that were zeroed are zeroed in ``grad_shard``, too, which has to have arrived for that.
        if self.state is GradState.REDUCED:
            self.arrivals.wait()
            self._drop_zeroed(found.zeroed)
            self._drop_stale()
        assigned = self._present() if self.state is GradState.LOCAL else found.local
        slots = self.layout.slots
        return Edits({slots[index].param for index, _ in assigned}, {slots[index].param for index in found.gone})

    def abandon(self) -> None:
        """Wait for nothing any more: the ranks have parted, or the optimizer is closed on this rank alone."""
        # At stage 3 ``clear`` frees memory. A reduction under way keeps the memory that it writes into.
        if self.flat.sharded and self.arrivals.under_way:
            self._allocate_gradients()
        self.arrivals.abandon()
        self._end_unsharding()

    def clear(self) -> None:
        """Forget every gradient. At stage 3 their memory goes, else it stays."""
        self.slots.clear()
        if self.flat.sharded:
            self.leave_memory()
            deallocate(self.grad_buffer)

    def leave_memory(self) -> None:
        """Make ``grad_buffer`` memory that no reduction writes and no user keeps, before it is freed."""
        # A reduction may still write into it: memory that is freed under one is another tensor's soon.
        self.arrivals.wait()
        self._use_new_memory_if_kept()

    def unapplied(self, *, applied: bool) -> list[str]:
        """Label the slots with a gradient in ``.grad``. ``applied``: leave out those that the bucket has put there."""
        there = zip(self.params, self._handles(), strict=True)
        return [
            self.label(index)
            for index, (parameter, handle) in enumerate(there)
            if (grad := parameter.grad) is not None and not (applied and grad is handle)
        ]

    def zero(self) -> None:
        """Make every gradient that is there zero, as ``zero_grad(set_to_none=False)`` means."""
        if self.state is not GradState.EMPTY:
            # With averages the rest of ``grad_buffer`` means nothing, and a collective may still read it.
            buffer = self.grad_shard if self.state is GradState.REDUCED else self.grad_buffer
            self.arrivals.then(partial(_zero, buffer))
        for _, grad in self.slots.scan(self._handles()).local:
            local_of(grad).detach_().zero_()

    def _handles(self) -> Sequence[Tensor | None]:
        """List what each ``.grad`` is while the bucket holds the slot's gradient."""
        if self.state is GradState.EMPTY:
            return [None] * len(self.params)
        return self._local_views if self.state is GradState.LOCAL else self._reduced_handles()

    @property
    def _local_views(self) -> Sequence[Tensor]:
        if not self._are_terms:
            return self._views
        # Made anew each time: a list that is kept would look like a user who keeps gradients.
        return [self._terms[index] if index in self._are_terms else view for index, view in enumerate(self._views)]

    def _reduced_handles(self) -> Sequence[Tensor]:
        return self._shards or self._views

    def _present(self) -> list[tuple[int, Tensor]]:
        return [(index, p.grad) for index, p in enumerate(self.params) if p.grad is not None]

    def _drop_stale(self) -> None:
        """Take stale slots out of ``grad_shard``: all of them in one go, else one by one."""
        stale = [*self.slots.stale]
        if not stale:
            return
        # One kernel where all of it goes, as after ``module.zero_grad()``; else one for each slot.
        if len(stale) == len(self.params):
            self.arrivals.then(partial(_zero, self.grad_shard))
        else:
            self.arrivals.then(partial(_zero, *(self._part_of(index) for index in stale)))

    def _drop_zeroed(self, zeroed: Sequence[tuple[int, Tensor]]) -> None:
        """Zero the averages of local gradients that were zeroed in place: ``.grad`` did not show them.

        Whether it is zero is asked on the device: no host sync.
        """
        for index, grad in zeroed:
            self.arrivals.then(partial(_keep_where, self._part_of(index), local_of(grad).detach().ne(0).any()))

    def _part_of(self, index: int) -> Tensor:
        """This rank's part of a slot's reduced gradient, flat."""
        piece = self.pieces[index]
        return self.grad_shard.narrow(0, piece.in_shard, piece.numel)

    def _of_this_rank(self, sources: list[tuple[int, Tensor]]) -> tuple[list[tuple[int, Tensor]], list[int]]:
        """Take the local tensors of gradients that may be ``DTensor``s. Returns them, and the slots of gradients that
        are terms of a sum over the tensor-parallel ranks."""
        if not self.flat.sliced:
            return sources, []
        found = [(index, *local_gradient(self.params[index], grad)) for index, grad in sources]
        return [(index, grad) for index, grad, _ in found], [index for index, _, is_term in found if is_term]

    def _with_dropped(self, terms: Sequence[int], sources: Sequence[tuple[int, Tensor]]) -> list[int]:
        """Add to ``terms`` the slots that were terms before and have no gradient now.

        The gradient may have been dropped on this rank alone. The other tensor-parallel ranks sum theirs, and this rank
        has to add zeros. Before the first reduction nobody knows which slots are terms.
        """
        self.terms.update(terms)
        return sorted({*terms, *self.terms.difference(index for index, _ in sources)})

    def _sum_terms(self, slots: Sequence[int], full: Tensor) -> None:
        """Sum the gradients of these slots, which were packed into ``full``, over the tensor-parallel ranks.

        They all sum the same slots, as each goes through the same forward and backward; see also ``_with_dropped``.
        Marked slots are summed in any case: a rank without a gradient adds zeros.
        """
        places = [self.layout.slots[index] for index in slots]
        self.sharding.sum_over_slices([full.narrow(0, place.offset, place.numel) for place in places])

    def pack(self, sources: Sequence[tuple[int, Tensor]], full: Tensor, scale: float, accumulate: bool = False) -> None:
        """Pack gradients, each with its slot's number, into ``full`` [numel], times ``scale``.

        ``accumulate``: slots that were marked non-finite before stay so.
        """
        grads = [grad for _, grad in sources]
        usual = self._dtypes.issuperset(map(_dtype_of, grads)) and _STRIDED.issuperset(map(_layout_of, grads))
        if self.flat.permuted:  # autograd gives a gradient in the parameter's memory format, so these are contiguous
            grads = [as_stored(grad, self.flat.orders[index]) for index, grad in sources]
        if not usual or not all(map(Tensor.is_contiguous, grads)):  # torch lets none be on another device
            grads = [self._checked_or_refused(index, grad) for (index, _), grad in zip(sources, grads, strict=True)]
        if len(grads) < len(self.params):
            present, grads = grads, [self._absent] * len(self.params)
            for (index, _), grad in zip(sources, present, strict=True):
                grads[index] = grad
        flags = torch.empty_like(self.nonfinite) if accumulate else self.nonfinite
        self._pack_op(grads, self.offsets, full, scale, flags)  # zeroes the gaps
        if accumulate:
            torch.maximum(self.nonfinite, flags, out=self.nonfinite)

    def _checked_or_refused(self, index: int, grad: Tensor) -> Tensor:
        try:
            return self._checked(index, grad)
        except GradientError as error:
            # Alone, a rank raises at once. Of several, to raise here would leave the others waiting in the reduction.
            if not self.sharding.agrees:
                raise
            self.slots.refused[index] = str(error)  # the others count on this rank: the exchange tells them all
            if grad.dtype != self.dtype and getattr(self.params[index], "grad_dtype", None) is not None:
                self.params[index].grad = None
                self.params[index].grad_dtype = self.dtype  # else ``.grad`` cannot become the handle of the result
            return self._absent

    def _checked(self, index: int, grad: Tensor) -> Tensor:
        if grad.layout is not torch.strided or grad.dtype != self.dtype or grad.device != self.device:
            remedy = "For an embedding, build it with sparse=False"
            if grad.layout is torch.strided:
                remedy = "Leave the parameter's grad_dtype and device as they are"
            raise GradientError(
                f"the gradient of {self.label(index)} is {grad.dtype} {grad.layout} on {grad.device}; expected a dense "
                f"{self.dtype} on {self.device}. {remedy}"
            )
        return grad.detach().contiguous()


def _poison_beside(shard: Tensor, full: Tensor) -> None:
    """Fill ``full`` with NaN beside ``shard``, a view of it."""
    kept = shard.clone()
    full.fill_(torch.nan)
    shard.copy_(kept)


def _zero(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.zero_()


def _keep_where(tensor: Tensor, keep: Tensor) -> None:
    tensor.copy_(torch.where(keep, tensor, torch.zeros_like(tensor)))
    keep_for_current_stream(keep)  # it may be of the stream on which it was decided
