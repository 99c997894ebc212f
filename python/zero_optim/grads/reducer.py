"""Reduces gradients while backward runs, in one fixed order of collectives.

What happens to a gradient, from the hook that autograd calls to ``finish`` in ``step``::

    hook: a gradient is ready ──> readiness: may its bucket leave? ──> launch, by ascending index
    backward has ended        ──> the buckets that are left leave: the round is complete
    step                      ──> the rounds that are owed; then everything is waited for

Three words say how far that goes. A bucket is *launched* when its reduction leaves. A round, or a backward's gathers,
is *completed* when all that is left of it has left: a rank does so for the others, whatever became of its own backward.
``step`` *finishes*: it completes what is owed, and waits for all of it.

Each part has a file: ``readiness`` says when a bucket may leave, ``rounds`` what is owed to the other ranks, ``slots``
what a bucket holds of one gradient, ``bucket`` packs and launches. This one joins them.

The law: what a rank has launched follows from its program and from what all ranks know, never from how fast the others
are. So a backward's reductions have left when it ends, whichever optimizers share it. Where a rank must not wait within
a backward (``may_wait`` is False), reductions in flight take memory of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..backward_watch import BackwardWatch, current_task
from ..comm.buffers import PATIENCE_SECONDS, CommBuffers
from ..comm.sharding import Sharding
from ..comm.spans import LOGGER
from ..comm.streams import GradStreams
from ..errors import ParameterError, RankMismatchError, ZeroOptimError
from ..mode import CurrentMode
from ..params.storage_order import described
from ..units.schedule import UnitSchedule, complete_raised_backwards, prefetch_rest_of_backwards
from ..user_thread import UserThread
from .bucket import Bucket, Edits
from .buckets import Buckets, MakeBuckets, buffer_nbytes
from .ddp_check import check_not_replicated
from .hooks import GradHooks
from .readiness import ByCounts, ByUnits, Learned, Readiness, merged
from .round_grads import RoundGrads
from .rounds import Rounds, RoundState
from .slots import GradState, Zeroed

_open: list[weakref.ref[Reducer]] = []
"""The reducers of this process's open optimizers, in the order in which they were made.

The list is here because a reducer looks for the others of its thread. Each leads to its engine, and the engine to its
optimizer."""


def open_reducers() -> list[Reducer]:
    """List the open reducers of this process, in the order in which they were made."""
    return [reducer for reference in _open if (reducer := reference()) is not None]


class Reducer:
    """Owns the buckets and their gradients, from the first hook of backward to ``finish`` in ``step``.

    Args:
        parameters: all trained parameters, by index; ``grow`` is told of new ones.
        labels: a name for each, for messages.
        make_buckets: builds the buckets for an order; parameters become views of them.
        overlap: reduce during backward. Else stage 1 reduces in ``finish``, the others at the end of backward.
        schedule: at stage 3, the schedule of the units, which knows whose backward is over.
        mode: of the optimizer.

    Attributes:
        rounds: the rounds of reductions that this rank owes.
        layout: the buckets.
        thread: the thread that trains with the optimizer; at stage 3, that uses the model.
        buffers: the memory that buckets pack into, and receive in.
        engine: returns the engine that this reducer is a part of; None once that is gone.
        on_layout: called with the buckets after they were laid out anew.
        on_change: called when gradients change after an exchange may have read them; on all ranks at the same point.
        late: parameters whose gradient arrived after their bucket had left; it stays on this rank.
        leftover: parameters whose gradient ``finish`` found to be assigned after the last round. Where all ranks have
            some, ``reduce_leftover`` lets the next ``finish`` reduce them.
    """

    def __init__(
        self,
        parameters: dict[int, Tensor],
        labels: Sequence[str],
        sharding: Sharding,
        make_buckets: MakeBuckets,
        overlap: bool,
        schedule: UnitSchedule | None = None,
        mode: CurrentMode | None = None,
    ) -> None:
        self.parameters, self.labels, self.sharding, self.overlap = parameters, labels, sharding, overlap
        self._reduces = sharding.reduces  # asked for every gradient
        self._mode = mode or CurrentMode()
        self.layout = Buckets(labels, sharding, make_buckets)
        self._schedule = schedule if sharding.reduces else None  # one rank gathers nothing
        self._hooks = GradHooks(self._before_accumulate if sharding.reduces else None, self._on_ready)
        self._counts = ByCounts(sharding.reduces and self._schedule is None, self._hooks.followed_by_users)
        self._readiness: Readiness = self._counts if self._schedule is None else ByUnits(self._schedule)
        self._in_place: set[int] = set()  # buckets whose parameters were found to be views of them, in this backward
        self.buffers = CommBuffers(0, sharding.device)
        self._watch = BackwardWatch(self._backward_begins, self._backward_ended)
        self.thread = UserThread() if schedule is None else schedule.thread
        self.rounds = Rounds()
        self.synchronize = True  # False inside no_sync()
        self._next = 0  # the bucket that leaves next, of the open round; 0 where none is open
        self._round_grads = RoundGrads(parameters)
        self._streams = GradStreams(sharding.device)
        self.late: set[int] = set()
        self.leftover: set[int] = set()
        self.engine: Callable[[], object] = _nothing
        self.on_layout: Sequence[Callable[[list[Bucket]], None]] = ()
        self.on_change: Sequence[Callable[[], None]] = ()
        self.grow(list(parameters))
        if self._schedule is not None:
            self._schedule.listeners.append(self)
        _open[:] = [weakref.ref(reducer) for reducer in (*open_reducers(), self)]

    # -- the layout ------------------------------------------------------------------------------------------------

    def grow(self, indices: Sequence[int]) -> list[Bucket]:
        """Take in parameters, in buckets after all others. The next backward observes. Returns the new buckets."""
        self.complete_raised()
        new = self.layout.grow(indices)
        self._use_layout()
        self._hooks.register({index: self.parameters[index] for index in indices})
        self._counts.forget(order=True)
        self._use_readiness()
        self.rounds.local()
        return new

    def lay_out(self, *parts: Sequence[int]) -> None:
        """Build all buckets anew for ``parts`` of the parameters: see ``Buckets``. Collective where they hold reduced
        gradients, which move along."""
        everyone = self.sharding.everyone
        try:
            self.layout.lay_out(*parts)
            with everyone.raising_together("making the buffers", self.sharding.device):  # memory may be lacking
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
        self.buffers.deallocate()
        buckets = ((bucket.layout.numel, bucket.dtype) for bucket in self.buckets)
        self.buffers = CommBuffers(buffer_nbytes(buckets, self.sharding), self.sharding.device)
        self._deallocate_idle_buffers()
        self._use_readiness()

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order in which they leave."""
        return self.layout.all

    def _use_readiness(self) -> None:
        self._readiness.use(self.buckets)

    def restore_order(self, *parts: Sequence[int]) -> None:
        """Lay the buckets out in a saved order, by parts as they were; parameters not in it follow. Gradients are
        dropped."""
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
        if bucket.slots.bucket_state is GradState.REDUCED:
            bucket.before_accumulate(slot)

    def _on_ready(self, index: int, parameter: Tensor) -> None:
        """Count a gradient that is ready.

        This runs for every gradient, so it does little more: 4 µs here are a third of a backward over parameters of 512
        elements. Work that can wait until a bucket is full does.
        """
        if self._streams.several:  # before anything can raise: autograd has written the gradient by now
            self._streams.note()
        if current_task() != self._watch.task:
            self._watch.enter()
        bucket, number, slot = self.layout.slot_of[index]
        # Its bucket has left: the others have reduced without this gradient. The exchange tells them, and all raise.
        if number < self._next:
            self.late.add(index)
            return
        if self._schedule is not None:
            self._check_shown(bucket, slot)
        if self._reduces:  # if this backward raises, these notes show later what the user has zeroed since
            self._round_grads.note(index, parameter)
            if bucket.slots.bucket_state is GradState.REDUCED:
                bucket.slots.added(slot)
        if self._readiness.gradient_ready(index, number):
            self._bucket_full(bucket, number)
        elif self._schedule is not None and self.rounds.open:  # units that are over launch by themselves
            self._deallocate_idle_buffers()

    def _bucket_full(self, bucket: Bucket, number: int) -> None:
        self._check_in_place(bucket, number)
        if self.rounds.open:
            self._launch_ready()
        elif bucket.can_collect and self._stays_local and not torch.is_grad_enabled():
            bucket.collect(self._streams)  # with gradients enabled ``.grad`` has a graph to keep

    def _check_shown(self, bucket: Bucket, slot: int) -> None:
        if bucket.flat.sharded and not bucket.flat.shown:
            raise ZeroOptimError(
                f"the gradient of {bucket.label(slot)} was computed while its unit was sharded, and is worthless: a "
                "gradient came into the unit by another way than what its forward returned, changed or left in "
                "attributes. Return that tensor from the unit's forward"
            )

    def _check_in_place(self, bucket: Bucket, number: int) -> None:
        """Check once a backward that the bucket's parameters are views of it: when it is full, else at the end of the
        backward, unless it is sharded then."""
        if number in self._in_place or (bucket.flat.sharded and not bucket.flat.shown):
            return
        moved = bucket.flat.first_moved()
        if moved is not None:
            self._raise_moved(bucket, moved)
        self._in_place.add(number)

    def _check_not_cast(self) -> None:
        """Check in ``step`` that no parameter was cast after the last backward, as between ``zero_grad`` and here."""
        for bucket in self.buckets:
            if not bucket.flat.sharded and (cast := bucket.flat.first_cast()) is not None:
                self._raise_moved(bucket, cast)

    def _raise_moved(self, bucket: Bucket, slot: int) -> NoReturn:
        if self.sharding.reduces:  # a client that moves a model and wraps it in DDP is to hear of DDP first
            check_not_replicated(self.parameters, self.labels)
        parameter = bucket.params[slot]
        raise ParameterError(
            f"{bucket.label(slot)} was moved, cast, or given another shape or memory format after the optimizer "
            f"was made (it is {described(parameter)} on {parameter.device}): call .to() / .half() before, or make "
            "a new optimizer"
        )

    # -- a backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients within it add up on each rank, without communication."""
        # Every rank enters here, so a round that a raise has left open is completed now, outside of the block.
        self.complete_all_raised()
        self._tell_change()  # a call within the block must not use an exchange of before
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
            self.rounds.local()
            self._excuse_forwards()
            self._tell_change()

    def _excuse_forwards(self) -> None:
        if self._schedule is not None:
            self._schedule.excuse(self)

    def _tell_change(self) -> None:
        for tell in self.on_change:
            tell()

    @property
    def _stays_local(self) -> bool:
        """True if gradients of a backward that begins now stay on this rank, and nobody is to reduce them soon."""
        return not self.sharding.reduces or not self.synchronize

    @property
    def _may_wait(self) -> bool:
        """True if the host may wait for other ranks within a backward. Not where another optimizer reduces in it::

            rank 0   uses A alone: waits in A for rank 1
            rank 1   uses B alone: waits in B for rank 0

        At stage 0 it may: every rank has to meet such optimizers in one order, as each backward ends with a wait.
        """
        return self.sharding.stage == 0 or not self.sharding.everyone.shared

    def _backward_begins(self) -> None:
        self._mode.check_awake("backward")
        self.thread.note()
        complete_raised_backwards(self.thread)
        # What other optimizers owe leaves now, before this backward waits for anything: other ranks may wait for it.
        for reducer in self._not_in_backward():
            reducer.complete_raised()
        self._round_grads.backward_begins()
        self._in_place.clear()
        for bucket in self.buckets:
            bucket.slots.backward_begins()
        if self.synchronize:
            self._tell_change()
            if self.sharding.reduces and (self.overlap or self.sharding.stage != 1):
                self._open_round()
            else:
                self.rounds.local()  # now, not as it ends: it may raise here, and not on another rank

    def _backward_ended(self) -> None:
        for number, bucket in enumerate(self.buckets if self._schedule is None else ()):
            self._check_in_place(bucket, number)
        self._readiness.backward_ended()
        self._streams.backward_ended()
        if self.rounds.open:
            if self._counts.learned is not Learned.ALL and self.rounds.launched == 0:  # the walk is slow: not each time
                check_not_replicated(self.parameters, self.labels)
            self._complete_round(self._complete_backward)
            self._wait_for_averages()
        else:
            self.rounds.local()
            self._readiness.begin()
        for bucket in self.buckets:
            bucket.slots.backward_ended()

    # -- what the schedule of units tells, at stage 3 --------------------------------------------------------------

    def backward_moves(self) -> None:
        """Open the round where backward goes on to another unit, before this rank has any gradient.

        This rank may have skipped units that others have used, and whose reductions they launch now. No round is opened
        under ``torch.autograd.grad``, which accumulates nothing::

            rank 0   unit 3: gradients      unit 2: reduction of 3 leaves
            rank 1   (has not called 3)     unit 2: reduction of 3 leaves, before any gradient
        """
        if self._watch.running or not self.synchronize:
            return
        if any(map(self._hooks.accumulates, self.parameters)):  # as a rule the first does
            self._watch.enter()

    def units_over(self) -> None:
        """Launch the buckets of units that are over: in this backward, or in one that raised and is completed now."""
        launched = self._next
        zeroed = None
        if self.rounds.state is RoundState.OPEN and not self._watch.running:  # another call joins one that raised
            zeroed = self._round_grads.after_raise(self.buckets[:launched]).zeroed
        if self.rounds.open:
            self._launch_ready()
        _drop(self.buckets[launched : self._next], zeroed)  # so that no ``.grad`` shows it until the round is complete

    def order_known(self) -> None:
        """Put the buckets in the order that the ranks have agreed on: that in which backward is through with units."""
        assert self._schedule is not None
        flats = [flat for unit in self._schedule.orders.over for flat in unit.flats]
        buckets = sorted(self.buckets, key=lambda bucket: flats.index(bucket.flat))
        if buckets != self.buckets:
            self.complete_raised()
            self.layout.use([[slot.param for bucket in buckets for slot in bucket.layout.slots]], buckets)
            self._use_layout()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _open_round(self) -> None:
        self.rounds.begin()
        self.sharding.everyone.rounds += 1
        self._next = 0

    def _launch_ready(self) -> None:
        """Launch the buckets that may leave, while backward runs."""
        while self.overlap and self._next < len(self.buckets) and self._readiness.may_launch(self._next):
            self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        if self._schedule is not None and self._one_at_a_time:
            self.buffers.deallocate_once_arrived()  # waits for the reduction before this one
            self._schedule.prefetch.reduction_begins(self)
        self.buckets[self._next].launch(self.buffers, self._streams, may_wait=self._may_wait)
        self._next += 1

    def _complete_round(self, gathers: Callable[[], None]) -> None:
        """Launch the rest of the open round, or a whole round where none is open. It waits for nothing.

        ``gathers`` runs first: at stage 3 it completes the backward's gathers, and the bucket of each unit that is over
        in it is launched. Ranks that did not raise have launched in that order, and wait for us in it.
        """
        if not self.rounds.open:
            self._open_round()
        self.rounds.complete()
        gathers()
        while self._next < len(self.buckets):
            self._launch_next()
        self.rounds.completed()
        self._next = 0
        self._round_grads.forget()
        self._readiness.begin()

    def _wait_for_averages(self) -> None:
        """Wait, at stage 0, for the reductions: there ``.grad`` is the average, and may be read at once."""
        if self.sharding.stage == 0:
            prefetch_rest_of_backwards(self.thread)
            for bucket in self.buckets:
                bucket.wait()

    def _complete_backward(self) -> None:
        if self._schedule is not None:
            self._schedule.complete_backward()

    def complete_all_backwards(self) -> None:
        """Collective, at a call that every rank makes after its backward. Join all gathers that are left of it.

        Other ranks may wait in them, even if the backward raised here before it came to any unit::

            rank 0   backward: raises at once               step: joins the gathers of units 3, 2 and 1
            rank 1   backward: waits to gather unit 3       unit 2   unit 1   step
        """
        if self._schedule is not None:
            self.complete_raised()
            self._schedule.complete_all_backwards()

    def complete_before_closure(self) -> None:
        """Collective, before ``step`` calls its closure. At stage 3, complete a backward that raised before.

        The closure's forward gathers, and must not meet the gathers of a backward in which other ranks still are. Where
        that backward raised here before its first gradient, other ranks may have launched its round, and this rank
        cannot know. But all ranks know of the forward before it. So each rank that has launched nothing since launches
        its round now. The closure's backward may reach only some ranks, so afterwards every rank owes a round.
        """
        if self._schedule is None:
            return
        self.complete_raised()
        if self.synchronize and self.rounds.state.owed and self._schedule.is_announced(self):
            self._complete_round(self._schedule.complete_all_backwards)
        else:
            self._schedule.complete_all_backwards()
        self.complete_all_raised()
        self.rounds.local()

    def complete_raised(self) -> None:
        """Launch the rest of a round that a raised backward has left open: the other ranks have launched theirs.

        The user may have zeroed gradients since the raise. That counts as done after the round. If every gradient that
        this rank had in the round was zeroed, the user meant all of the round, for example by ``module.zero_grad()``.
        Then averages that arrive only now are dropped, too. See ``RoundGrads``.
        """
        self._watch.forget()  # a backward that raised has no end: the next hook belongs to another one
        self._readiness.begin()
        if not self.rounds.open:
            return
        self.sharding.everyone.check_not_parted()
        if self.out_of_step:
            raise RankMismatchError(
                "an earlier error has parted the ranks in a backward: make a new optimizer to go on"
            )
        found = self._round_grads.after_raise(self.buckets[: self._next])
        # At stage 0 the averages overwrite ``.grad``, so what the user has zeroed there is lost as well.
        unseen = self.buckets if self.sharding.stage == 0 else self.buckets[found.launched :]
        # At stage 3 the schedule meets a new backward before we do, and it has ended the raised one's cycle then. The
        # cycle that is open now belongs to the new backward: to join it here would end that one.
        next_is_under_way = self._schedule is not None and self._schedule.watch.running
        self._complete_round(_nothing if next_is_under_way else self._complete_backward)
        _drop(unseen, found.zeroed)

    @property
    def out_of_step(self) -> bool:
        """True if a collective has failed: the other ranks are at another one, and nothing can be completed."""
        return self.sharding.everyone.out_of_step or (self._schedule is not None and self._schedule.out_of_step)

    def complete_all_raised(self) -> None:
        """Complete what a raised backward has left open: here, and in every optimizer that it went through.

        Every rank calls this. All optimizers launch before one is waited for. At stage 0, with optimizers A and B::

            rank 0   backward: raises, before B                A.step(): launches A and B, then waits for A
            rank 1   backward: launches both, waits for B      A.step()
        """
        self.thread.note()
        chosen = self._not_in_backward()
        for reducer in chosen:
            reducer.complete_raised()
        # Those under ``no_sync`` have no round, and other ranks wait in their gathers.
        complete_raised_backwards(self.thread)
        for reducer in chosen:  # only now, when all are launched
            reducer._wait_for_averages()
            reducer._streams.join()  # autograd does so where a backward ends, and not where it raises

    def _not_in_backward(self) -> list[Reducer]:
        """List this reducer, and those of its thread that no running backward has come to: if open, they have raised.

        Reducers with units come first: a rank that waits in their gathers launches nothing until we join.
        """
        own = [of for of in open_reducers() if self.thread.may_complete(of.thread)]
        chosen = [of for of in own if of is self or not (of.out_of_step or of._watch.running)]
        return sorted(chosen, key=lambda reducer: reducer._schedule is None)

    # -- step ------------------------------------------------------------------------------------------------------

    def finish(self) -> bytearray:
        """Complete what is owed; afterwards every bucket's ``grad_shard`` holds what is to be applied.

        Returns one byte a parameter index: 1 where this rank has a gradient for it.
        """
        self._watch.forget()
        if not self.sharding.reduces:
            self._collect()
        else:
            self.complete_all_backwards()
            self.complete_all_raised()
            if not self.synchronize:
                self.rounds.local()  # within a no_sync block: other ranks may have had gradients in it
            if self.rounds.state.owed:  # one at most: no round is open any more
                self._check_not_cast()
                self._complete_round(_nothing)
            assigned: set[int] = set()
            for bucket in self.buckets:
                assigned |= bucket.follow_edits().assigned
            self.leftover = set() if self.late else assigned
            if self._counts.learned is not Learned.ALL:
                self._learn()
        for bucket in self.buckets:
            bucket.wait()
            bucket.note_writes()  # what comes from here on is the user's
        self._deallocate_idle_buffers()
        return self.layout.used()

    def _learn(self) -> None:
        """Collective. Agree on readiness, and lay the buckets out in the order that rank 0 has seen."""
        reports = merged(self._counts.observation(), self.sharding, len(self.labels))
        order = self._counts.agree(reports, self.layout.order)
        if order is not None:
            self.lay_out(order)
        LOGGER.info("learned when gradients become ready: %d buckets leave in that order", len(self.buckets))
        self._use_readiness()

    def reduce_leftover(self) -> None:
        """Let the next ``finish`` reduce gradients that were assigned after the last round, on every rank."""
        self.rounds.local()

    def unapplied(self) -> list[str]:
        """Name the parameters with gradients that no step has applied."""
        applied = self.rounds.applied and self.synchronize
        return [label for bucket in self.buckets for label in bucket.unapplied(applied=applied)]

    def make_readable(self) -> bool:
        """Bring all gradients into ``grad_buffer``, if this is where ``.grad`` shows them. Returns whether it is."""
        if self.sharding.stage == 0 and self.sharding.reduces:
            self.finish()
            return True
        alone = not self.sharding.reduces
        waiting = self.sharding.stage == 1 and not self.overlap and all(bucket.can_collect for bucket in self.buckets)
        if alone or waiting:
            self._collect()
        return alone or waiting

    @torch.no_grad()
    def _collect(self) -> bool:
        changed = False
        for bucket in self.buckets:
            changed |= bucket.collect(self._streams)
        return changed

    def follow_edits(self) -> Edits:
        """Take gradients as the user has left them. Returns the edits since ``finish``, or since the last call."""
        edits = Edits()
        for bucket in self.buckets:
            if bucket.written:
                edits.written.update(slot.param for slot in bucket.layout.slots)
            if self.sharding.reduces:
                of_bucket = bucket.follow_edits()
                edits.assigned |= of_bucket.assigned
                edits.dropped |= of_bucket.dropped
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
        """Note that the gradients were applied. They stay until they are cleared; the next step has its own rounds."""
        self._streams.forget()
        self.rounds.step()
        self._excuse_forwards()

    def clear(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or make it zero. A round that an exception cut short is completed for the others."""
        zeroed_before = self.sharding.reduces and self.rounds.zeroed
        if zeroed_before:  # every rank comes here then: it is the second call since a step
            self.complete_all_backwards()
        self.complete_all_raised()
        if zeroed_before:
            self._launch_missed_rounds()
        self.sharding.issue_second_legs()  # else ranks whose next backward has data wait for one that has none
        self.rounds.clear()
        self._excuse_forwards()
        self._round_grads.forget()
        self.late.clear()
        self.leftover.clear()
        self._counts.drop_observation()
        self.layout.nonfinite.zero_()
        for bucket in self.buckets:
            bucket.clear() if set_to_none else bucket.zero()
        self._streams.forget()
        self._deallocate_idle_buffers()

    def _launch_missed_rounds(self) -> None:
        """Collective. Launch as many rounds as any rank has since the last ``zero_grad``; the results are dropped.

        A backward that raised before its first gradient has left no trace here, and the others wait for its round. It
        is looked for where gradients are zeroed a second time, with no ``step`` between: every rank knows of that.
        """
        launched = self.sharding.everyone.gather_objects(self.rounds.launched, "zero_grad")
        for _ in range(max(launched) - self.rounds.launched):
            self.sharding.everyone.rounds += 1
            for bucket in self.buckets:
                bucket.launch_zeros()

    def observe(self) -> None:
        """Let the next synchronised backward count anew how often each gradient becomes ready. The layout stays."""
        self.complete_all_raised()
        self.late.clear()
        self._counts.forget(order=False)
        self._use_readiness()

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, collective: bool) -> None:
        """Remove the hooks and drop the gradients. ``collective``: complete an open round, as other ranks may have."""
        try:
            if collective:
                self.complete_all_raised()
            for bucket in self.buckets if collective else ():
                bucket.wait_for_parameters()
                if bucket.arrives_within(PATIENCE_SECONDS):
                    bucket.wait()
        except RuntimeError:  # whoever closes after an error has seen it
            self._fall_out_of_step()
        if self._schedule is not None:  # only now: it tells of units that are over while the round is completed
            self._schedule.remove(self)
        self._hooks.remove()
        _open[:] = [of for of in _open if of() is not self]
        for bucket in self.buckets:
            if bucket.arrivals.under_way or bucket.unsharding is not None:
                self._fall_out_of_step()
            bucket.abandon()
            bucket.clear()
        self.sharding.abandon()

    def has_own_gradients(self) -> bool:
        """Tell whether there is a gradient to which this rank has added."""
        return any(self.layout.used()) or any(parameter.grad is not None for parameter in self.parameters.values())

    def _fall_out_of_step(self) -> None:
        """Note that a collective may not arrive any more."""
        if self.sharding.host_waits:
            self.sharding.everyone.abandon()
        else:
            self.sharding.everyone.out_of_step = True

    # -- the buffers, at stage 3 -----------------------------------------------------------------------------------

    @property
    def _one_at_a_time(self) -> bool:
        """True if a reduction waits for the one before: under gloo, where the host waits anyway, it saves memory. On
        CUDA the host is ahead of both."""
        return self._schedule is not None and self.sharding.host_waits and self._may_wait

    def _deallocate_idle_buffers(self) -> None:
        """Free the buffers' memory, at stage 3, while no reduction uses it: units take it meanwhile.

        On a GPU the host never knows whether one does, and ``idle`` is True: to free the memory makes the stream wait.
        So there the buffers stay while a round is open, as the backward must go on. They go in ``step``, or before.
        """
        waits_for_nothing = self.sharding.host_waits or not self.rounds.open
        if self._schedule is not None and waits_for_nothing and self.buffers.allocated and self.buffers.idle:
            self.buffers.deallocate()
            self._schedule.prefetch.reductions_arrived(self)


def _nothing() -> None:
    pass


def _drop(buckets: Sequence[Bucket], zeroed: Zeroed | Tensor | None) -> None:
    """Zero all gradients of these buckets in the way that the user has zeroed the others. See ``AfterRaise``."""
    for bucket in buckets:
        if isinstance(zeroed, Tensor):
            bucket.keep_where(zeroed)
        elif zeroed is not None:
            bucket.drop_all(zeroed)
