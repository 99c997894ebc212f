"""Reduces gradients while backward runs, in one fixed order of collectives.

What happens to a gradient, from the hook that autograd calls to ``finish`` in ``step``::

    hook: a gradient is ready ──> readiness: can its bucket be launched? ──> rounds launch, by ascending index
    backward has ended        ──> the other buckets are launched: the round is complete
    step                      ──> rounds that are owed are launched; then everything is waited for

What a rank has launched follows from its program and from what all ranks know, never from how fast the others are. So a
backward's reductions are launched when it ends, whichever optimizers it goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm.handle import PATIENCE_SECONDS, CommBuffers
from ..comm.sharding import Sharding
from ..comm.spans import LOGGER
from ..errors import ParameterError, ZeroOptimError
from ..mode import CurrentMode
from ..params.tensor_slice import is_distributed
from ..recovery import BackwardWatch, complete_raised, current_task
from ..units.schedule import UnitSchedule
from .bucket import Bucket, Edits
from .buckets import Buckets, MakeBuckets, buffer_nbytes
from .packing import ADDED
from .readiness import ByCounts, ByUnits, GradHooks, Learned, Readiness, merged
from .rounds import Rounds
from .slots import GradState


class Reducer:
    """Owns the buckets and their gradients, from the first hook of backward to ``finish`` in ``step``.

    Args:
        parameters: all trained parameters, by index; ``grow`` takes in new ones.
        labels: a name for each, for messages.
        make_buckets: builds the buckets for an order; parameters become views of them.
        overlap: reduce during backward. Else stage 1 reduces in ``finish``, the others at the end of backward.
        schedule: at stage 3, the schedule of the units, which knows whose backward is over.
        mode: of the optimizer.

    Attributes:
        rounds: the rounds of reductions that this rank owes.
        layout: the buckets.
        main_grads: by index, the ``main_grad`` of each parameter whose layer adds to it. Zero once it is packed.
        on_layout: called with the buckets after they were laid out again.
        on_change: called when gradients change after an exchange may have read them; on all ranks at the same point.
        on_clear: called when gradients are dropped.
        late: parameters whose gradient arrived after their bucket was launched; it stays on this rank.
        backwards: how many have reached this optimizer since the last step, or since gradients were dropped.
        leftover: parameters whose gradient ``finish`` found to be assigned after the last round. Where all ranks have
            some, another round reduces them.
    """

    def __init__(
        self,
        parameters: dict[int, Tensor],
        labels: Sequence[str],
        sharding: Sharding,
        make_buckets: MakeBuckets,
        overlap: bool,
        schedule: UnitSchedule | None,
        mode: CurrentMode,
    ) -> None:
        self.parameters, self.labels, self.sharding, self.overlap = parameters, labels, sharding, overlap
        self._reduces = sharding.reduces  # asked for every gradient
        self._mode = mode
        self.layout = Buckets(labels, sharding, make_buckets)
        self._schedule = schedule if sharding.reduces else None  # one rank gathers nothing
        self._hooks = GradHooks(self._before_accumulate, self._on_ready)
        self.main_grads: dict[int, Tensor] = {}
        self._aside: dict[int, Tensor] = {}  # the gradient, while autograd accumulates a dummy
        self._grad_dtypes: dict[int, torch.dtype | None] = {}  # as they were before
        # The first backward, too, must not hold all gradients. At stage 0 they are read when it ends.
        observes = sharding.reduces and self._schedule is None
        self._counts = ByCounts(observes, self._hooks.followed_by_users, guesses=observes and sharding.stage > 0)
        self._readiness: Readiness = self._counts if self._schedule is None else ByUnits(self._schedule)
        self._watch = BackwardWatch(self._backward_begins, self._backward_ended)
        self.rounds = Rounds(self.layout, sharding, self._readiness, self._watch, self._schedule, overlap=overlap)
        self._streams = self.rounds.streams
        self.synchronize = True  # False inside no_sync()
        self.late: set[int] = set()
        self.leftover: set[int] = set()
        self.backwards = 0
        self.on_layout: Sequence[Callable[[list[Bucket]], None]] = ()
        self.on_change: Sequence[Callable[[], None]] = ()
        self.on_clear: Sequence[Callable[[], None]] = ()
        self.grow(list(parameters))
        if self._schedule is not None:
            self._schedule.listeners.append(self)

    # -- the layout ------------------------------------------------------------------------------------------------

    def grow(self, indices: Sequence[int]) -> list[Bucket]:
        """Take in parameters, in buckets after all others. The next backward observes. Returns the new buckets."""
        self.rounds.complete_raised()
        for index in indices:
            self._prepare(index, self.parameters[index])
        new = self.layout.grow(indices)
        self._counts.forget(order=True)
        self._use_layout()
        precedes = {*indices} if self._reduces else self.main_grads.keys()
        self._hooks.register({index: self.parameters[index] for index in indices}, precedes)
        self.rounds.local()
        return new

    def _prepare(self, index: int, parameter: Any) -> None:
        """Set ``grad_dtype``, and make ``main_grad`` where a layer adds to it."""
        dtype = self.sharding.local_dtype(parameter.dtype)
        if hasattr(parameter, ADDED):
            if dtype != torch.float32 or is_distributed(parameter):
                raise ParameterError(
                    f"{self.labels[index]} is {parameter.dtype} and has {ADDED}, and main_grad is fp32: give the "
                    "optimizer grad_accumulation_dtype=torch.float32. A DTensor has no main_grad: delete the attribute"
                )
            self.main_grads[index] = parameter.main_grad = torch.zeros_like(parameter, dtype=dtype)
        if dtype != parameter.dtype:
            self._grad_dtypes[index] = parameter.grad_dtype
            grad, parameter.grad, parameter.grad_dtype = parameter.grad, None, dtype
            parameter.grad = None if grad is None else grad.to(dtype)

    def lay_out(self, *parts: Sequence[int]) -> None:
        """Build all buckets for ``parts`` of the parameters: see ``Buckets.lay_out``."""
        try:
            self.layout.lay_out(*parts)
            # Memory may be lacking.
            with self.sharding.world.raising_together("making the buffers", self.sharding.device):
                self._use_layout()
            for follow in self.on_layout:
                follow(self.buckets)
        except BaseException:  # on some rank parameters have left their old buckets, and found no new ones
            self._hooks.remove()
            self.layout.all = []
            raise

    def check_laid_out(self) -> None:
        """Raise where ``lay_out`` has failed."""
        if self.parameters and not self.buckets:
            raise ZeroOptimError("an earlier error came as the buckets were laid out anew: make a new optimizer")

    def _use_layout(self) -> None:
        self.rounds.buffers.deallocate()
        # gloo receives what other ranks send in a buffer. NCCL needs none for a gradient that is reduced as it is.
        packed = [bucket for bucket in self.buckets if self.sharding.host_waits or not bucket.zero_copy]
        buckets = ((bucket.layout.numel, bucket.dtype) for bucket in packed)
        self.rounds.buffers = CommBuffers(buffer_nbytes(buckets, self.sharding), self.sharding.device)
        self.rounds.deallocate_idle_buffers()
        self._readiness.use(self.buckets)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order in which they are launched."""
        return self.layout.all

    def restore_order(self, *parts: Sequence[int]) -> None:
        """Lay the buckets out in a saved order, and drop gradients. Parameters that are not in it follow."""
        known = {index for part in parts for index in part}
        *first, last = [[*part] for part in parts]
        last += [index for index in self.layout.order if index not in known]
        if self.sharding.reduces and self._schedule is None and [*first, last] != self.layout.parts:
            self.clear()
            self.lay_out(*first, last)

    # -- a gradient ------------------------------------------------------------------------------------------------

    def _before_accumulate(self, index: int, grads: Any) -> None:
        if current_task() != self._watch.task:  # first: what begins a backward reads ``.grad`` as the user has left it
            self._watch.enter()
        bucket, _, slot = self.layout.slot_of[index]
        main_grad = self.main_grads.get(index)
        if bucket.slots.bucket_state is GradState.REDUCED:
            if main_grad is not None and bucket.params[slot].grad is main_grad:
                bucket.slots.added(slot)  # its layer has written into it, not the user
            written = bucket.slots.accumulate(slot, bucket.shown.reduced()[slot])
            if written and (grad := bucket.params[slot].grad) is not None:
                bucket.drop_zeroed([(slot, grad)])
        if main_grad is not None and getattr(bucket.params[slot], ADDED, False):
            self._aside[index] = main_grad
            if (grad := bucket.params[slot].grad) is not None and grad is not main_grad:
                self._aside[index] = grad.add_(main_grad)
                main_grad.zero_()
            bucket.params[slot].grad = None  # the dummy is added to nothing

    def _on_ready(self, index: int, parameter: Any) -> None:
        """Count a gradient that is ready."""
        # This runs for every gradient, so it does little more: 4 µs here are a third of a backward over parameters of
        # 512 elements. Work that can wait until a bucket is full does.
        if index in self._aside:
            if getattr(parameter, "zero_out_wgrad", False):  # a tied weight: the dummy is zero, and the rest counts
                self._aside[index].add_(parameter.grad)
            parameter.grad, parameter.grad_added_to_main_grad = self._aside.pop(index), False
        if self._streams.several:  # before anything can raise: autograd has written the gradient by now
            self._streams.note()
        if current_task() != self._watch.task:
            self._watch.enter()
        bucket, number, slot = self.layout.slot_of[index]
        # Its bucket was launched: the other ranks reduce without this gradient. The exchange makes all ranks raise.
        if number < self.rounds.next and not self._counts.guesses:
            self.late.add(index)
            return
        if self._schedule is not None and bucket.flat.sharded and not bucket.flat.shown:
            raise ZeroOptimError(
                f"the gradient of {bucket.label(slot)} was computed while its unit was sharded, and is worthless: a "
                "gradient came into the unit by another way than what its forward returned, changed or left in "
                "attributes. Return that tensor from the unit's forward"
            )
        if self._reduces:
            # As autograd has left it: a change from here on is the user's. No local name may keep the gradient below.
            self.rounds.came[index] = -1 if parameter.grad is None else parameter.grad._version
            if bucket.slots.bucket_state is GradState.REDUCED:
                bucket.slots.added(slot)
        if self._readiness.gradient_ready(index, number):
            self.layout.check_in_place(number)
            if self.rounds.open:
                if self._counts.guesses and number == self.rounds.next == 0:  # DDP would read the shards in ``.grad``
                    self.layout.check_not_in_ddp()
                self.rounds.launch(rest=False)
            # With gradients enabled ``.grad`` has a graph to keep.
            elif not (self._reduces and self.synchronize) and bucket.can_collect and not torch.is_grad_enabled():
                bucket.collect(self._streams)
        elif self._schedule is not None and self.rounds.open:  # units that are over launch by themselves
            self.rounds.deallocate_idle_buffers()

    # -- a backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients within it add up on each rank, without communication."""
        # Every rank enters here, so a round that a raise has left open is completed now, outside of the block.
        self.rounds.complete_all_raised()
        self._changed()  # a call within the block must not use an exchange of before
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
            self.rounds.local()
            self._changed()

    def _changed(self) -> None:
        for act in self.on_change:
            act()

    def _backward_begins(self) -> None:
        self._mode.check_awake("backward")
        self.backwards += 1
        self.rounds.thread.note()
        self.rounds.complete_raised()
        complete_raised(self.rounds.thread)
        self.layout.backward_begins()
        self.rounds.note_again()
        if self.synchronize:
            self._changed()
            if self._reduces and (self.overlap or self.sharding.stage != 1):
                self.rounds.begin()
            else:
                self.rounds.local()  # now, not as it ends: it may raise here, and not on another rank

    def _backward_ended(self) -> None:
        if self._schedule is None:
            for number in range(len(self.buckets)):
                self.layout.check_in_place(number)
        self._readiness.backward_ended()
        self._streams.backward_ended()
        if self.rounds.open:
            # The walk is slow: not each time.
            if self._counts.learned is not Learned.ALL and self.rounds.launched == self.rounds.next == 0:
                self.layout.check_not_in_ddp()
            self.rounds.complete()
            if self._schedule is not None:  # each gather launches the buckets of the units that are over by then
                self._schedule.complete_backward()
            self.rounds.complete_round()
            self.rounds.wait_for_averages()
        else:
            self.rounds.local()
            self._readiness.begin()
        for bucket in self.buckets:
            bucket.slots.backward_ended()

    # -- called by the schedule of units, at stage 3 ---------------------------------------------------------------

    def backward_moves(self) -> None:
        """Open the round where backward goes on to another unit, before this rank has any gradient.

        This rank may have skipped units that others have used, and whose reductions they launch now. No round is opened
        under ``torch.autograd.grad``, which accumulates nothing::

            rank 0   unit 3: gradients      unit 2: reduction of 3 is launched
            rank 1   (has not called 3)     unit 2: reduction of 3 is launched, before any gradient
        """
        if self._watch.running or not self.synchronize:
            return
        if any(map(self._hooks.accumulates, self.parameters)):  # as a rule the first does
            self._watch.enter()

    def units_over(self) -> None:
        if self.rounds.open:
            self.rounds.launch_or_drop(rest=False)

    def order_known(self) -> None:
        """Put the buckets in the order in which backward is through with units, on which the ranks have agreed."""
        assert self._schedule is not None
        flats = [flat for unit in self._schedule.orders.over for flat in unit.flats]
        buckets = sorted(self.buckets, key=lambda bucket: flats.index(bucket.flat))
        if buckets != self.buckets:
            self.rounds.complete_raised()
            self.layout.use([[slot.param for bucket in buckets for slot in bucket.layout.slots]], buckets)
            self._use_layout()

    def complete_before_closure(self) -> None:
        """Collective, before ``step`` calls its closure. At stage 3, complete backwards that raised before.

        The closure's forward gathers, and must not meet the gathers of a backward in which other ranks still are. Its
        backward may reach only some ranks, so afterwards every rank owes a round.
        """
        if self._schedule is not None:
            self.rounds.complete_missed("step")
            self.rounds.local()

    # -- step ------------------------------------------------------------------------------------------------------

    def finish(self) -> bytearray:
        """Complete what is owed; afterwards every bucket's ``grad_shard`` holds what is to be applied.

        Returns one byte a parameter index: 1 where this rank has a gradient for it.
        """
        self._watch.forget()
        if not self.sharding.reduces:
            self._collect()
        else:
            self.rounds.complete_all_raised(due=True)
            if not self.synchronize:
                self.rounds.local()  # within a no_sync block: other ranks may have had gradients in it
            if self.rounds.state.owed:  # one at most: no round is open any more
                self.layout.check_not_cast()
                self.rounds.complete_round()
            self.sharding.second_legs.issue()  # all, before the first is waited for: they are in flight together
            edits = Edits()
            for bucket in self.buckets:
                bucket.follow_edits(edits)
            self.leftover = set() if self.late else edits.assigned
            if self._counts.learned is not Learned.ALL:
                # Collective. Agree on readiness, and lay the buckets out in the order that rank 0 has seen.
                reports = merged(self._counts.observation(), self.sharding, len(self.labels))
                # Buckets may have left before a gradient that came again: all ranks reduce the rest.
                if self._counts.guesses and any(count > 1 for report in reports for count in report.counts.values()):
                    self.rounds.complete_round()
                    self.leftover.clear()
                order = self._counts.agree(reports, self.layout.order)
                if order is None:
                    self._readiness.use(self.buckets)
                else:
                    self.lay_out(order)
                LOGGER.info("learned when gradients become ready: %d buckets leave in that order", len(self.buckets))
        for bucket in self.buckets:
            bucket.arrivals.wait()
            bucket.note_writes()  # what comes from here on is the user's
        self.rounds.deallocate_idle_buffers()
        return self.layout.used()

    def unapplied(self) -> list[str]:
        """Name the parameters with gradients that no step has applied."""
        applied = self.rounds.applied and self.synchronize  # then what the buckets have put into ``.grad`` is old
        found = []
        for bucket in self.buckets:
            for index, (parameter, handle) in enumerate(zip(bucket.params, bucket.handles(), strict=True)):
                if (grad := parameter.grad) is not None and not (applied and grad is handle):
                    found.append(bucket.label(index))
        return found

    def make_readable(self) -> bool:
        """Bring all gradients into ``grad_buffer``, if this is where ``.grad`` shows them. Returns whether it is."""
        if self.sharding.stage == 0 and self.sharding.reduces:
            self.finish()
            return True
        waiting = self.sharding.stage == 1 and not self.overlap and all(bucket.can_collect for bucket in self.buckets)
        if self.sharding.reduces and not waiting:
            return False
        self._collect()
        return True

    @torch.no_grad()
    def _collect(self) -> None:
        for bucket in self.buckets:
            bucket.collect(self._streams)

    def follow_edits(self) -> Edits:
        """Take gradients as the user has left them. Returns the edits since ``finish``, or since the last call."""
        if self.sharding.reduces:
            # At stage 3 a backward without gradients on this rank still has gathers to join.
            self.rounds.complete_all_raised(due=True)
        edits = Edits()
        for bucket in self.buckets:
            if bucket.written:
                edits.written.update(slot.param for slot in bucket.layout.slots)
            if self.sharding.reduces:
                bucket.follow_edits(edits)
            else:
                before = bytes(bucket.slots.used)
                if bucket.collect(self._streams):
                    for slot, was, now in zip(bucket.layout.slots, before, bucket.slots.used, strict=True):
                        if now:
                            (edits.written if was else edits.assigned).add(slot.param)
                        elif was:
                            edits.dropped.add(slot.param)
            bucket.note_writes()  # gradients that were dropped are zero now: the user has not written that
        return edits

    def end_step(self) -> None:
        """Record that the gradients were applied. They stay until they are cleared."""
        self._streams.forget()
        self.backwards = 0
        self.rounds.step()

    def clear(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or make it zero."""
        if self.sharding.reduces and self.rounds.zeroed:  # every rank makes this call: the second since a step
            self.rounds.complete_missed("zero_grad")
        else:
            self.rounds.complete_all_raised()
        self.sharding.second_legs.issue()  # else ranks whose next backward has data wait for one that has none
        self.rounds.clear()
        self.rounds.came.clear()
        self.late.clear()
        self.leftover.clear()
        self._aside.clear()
        self.backwards = 0
        for act in self.on_clear:
            act()
        self._counts.drop_observation()
        self.layout.nonfinite.zero_()
        for main_grad in self.main_grads.values():  # that of a backward that raised is in no ``.grad``
            main_grad.zero_()
        if set_to_none:
            self.layout.refused.clear()
        for bucket in self.buckets:
            bucket.clear() if set_to_none else bucket.zero()
        self._streams.forget()
        self.rounds.deallocate_idle_buffers()

    def observe(self) -> None:
        """Let the next synchronised backward count how often each gradient becomes ready. The layout stays."""
        self.rounds.complete_all_raised()
        self.late.clear()
        self._counts.forget(order=False)
        self._readiness.use(self.buckets)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, collective: bool) -> None:
        """Remove the hooks and drop the gradients. ``collective``: complete an open round, as other ranks may have."""
        try:
            if collective:
                self.rounds.complete_all_raised()
                if self._schedule is not None and not self._schedule.out_of_step:
                    self._schedule.drop_ahead()
            for bucket in self.buckets if not self.rounds.out_of_step else ():
                bucket.unsharding.order_reader()  # the model may outlive an optimizer that was only dropped
                if collective and bucket.arrivals.arrives_within(PATIENCE_SECONDS):
                    bucket.arrivals.wait()
        except RuntimeError:  # whoever closes after an error has seen it
            self._abandon()
        if self._schedule is not None:  # only now: it calls us for units that are over while the round is completed
            self._schedule.listeners.remove(self)
        self._hooks.remove()
        self.rounds.close()
        for bucket in self.buckets:
            if bucket.arrivals.in_flight or bucket.unsharding.pending is not None:
                self._abandon()
            bucket.abandon()
            bucket.clear()
        for index, dtype in self._grad_dtypes.items():
            self.parameters[index].grad, self.parameters[index].grad_dtype = None, dtype
        for index in self.main_grads:
            vars(self.parameters[index]).pop("main_grad", None)
        self.sharding.second_legs.abandon()
        self.sharding.gather_legs.abandon()

    def has_own_gradients(self) -> bool:
        """True if there is a gradient to which this rank has added."""
        return any(self.layout.used()) or any(parameter.grad is not None for parameter in self.parameters.values())

    def _abandon(self) -> None:
        """Record that a collective may not arrive any more."""
        if self.sharding.host_waits:
            self.sharding.world.abandon()
        else:
            self.sharding.world.log.failed = True
