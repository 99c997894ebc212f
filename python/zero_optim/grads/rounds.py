"""Counts reduction rounds, so that every rank launches the same number of collectives, and launches them.

A *round* is one synchronised backward's reductions: every bucket once, by ascending index. Between two calls that all
ranks make, they must launch equally many rounds. Each rank derives that number from its own calls, without a message.
After an exception in backward, a rank completes its round as ``recovery`` describes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from ..comm.handle import CommBuffers
from ..comm.sharding import Sharding
from ..comm.streams import GradStreams
from ..errors import RankMismatchError
from ..params.tensor_slice import local_of
from ..recovery import BackwardWatch, Owing, complete_raised
from ..units.schedule import UnitSchedule, prefetch_rest_of_backwards
from ..user_thread import UserThread
from .buckets import Buckets
from .readiness import Readiness


class RoundState(enum.Enum):
    """The state of a rank's rounds. The value has its name in messages, and the number of rounds that are owed.

    ============  ====  ==============================================================================
    state         owed  meaning
    ============  ====  ==============================================================================
    UNREDUCED     1     no round since the last ``step`` or ``zero_grad``
    COMPLETE      0     every gradient was in a round
    DIRTY         1     a round, and after it gradients that stayed on their rank
    OPEN          1     a round was begun: its backward runs, or has raised
    COMPLETING    1     the rest of the round is being launched
    ============  ====  ==============================================================================

    *Owed* is the number of rounds that ``step`` has to launch. In UNREDUCED a rank owes one, whether it had a backward
    under ``no_sync`` or none at all. So a rank without data takes part by calling ``step``.

    ============  ============  ============  ============  ============  ===========
    event         UNREDUCED     COMPLETE      DIRTY         OPEN          COMPLETING
    ============  ============  ============  ============  ============  ===========
    begin         OPEN          OPEN          OPEN          error         error
    complete      error         error         error         COMPLETING    COMPLETING
    completed     error         error         error         error         COMPLETE
    local         UNREDUCED     DIRTY         DIRTY         OPEN          COMPLETING
    step          UNREDUCED     UNREDUCED     UNREDUCED     error         error
    clear         UNREDUCED     UNREDUCED     UNREDUCED     error         error
    ============  ============  ============  ============  ============  ===========

    - *begin*: a synchronised backward begins; or a whole round does, outside of any backward.
    - *complete*: what is left of the round is launched now. *completed*: the last bucket was launched.
    - *local*: a ``no_sync`` block has ended, or a backward that reduces nothing. Whether this rank had a gradient in it
      does not matter: the others count the block, too. At stage 3 a closure that begins after a round is *local*, too:
      its backward may reach only other ranks.
    - *step*: the gradients were applied. *clear*: ``zero_grad`` has dropped them.
    """

    UNREDUCED = "unreduced", 1
    COMPLETE = "complete", 0
    DIRTY = "dirty", 1
    OPEN = "open", 1
    COMPLETING = "not complete", 1

    @property
    def owed(self) -> int:
        return self.value[1]


class RoundCounter:
    """The state of a rank's rounds.

    Attributes:
        launched: rounds since the last ``step`` or ``zero_grad``.
        zeroed: whether ``zero_grad`` was called since the last ``step``.
        applied: whether nothing was accumulated since the last ``step`` or ``zero_grad``: any gradient is stale.
    """

    def __init__(self) -> None:
        self.state = RoundState.UNREDUCED
        self.launched = 0
        self.zeroed = False
        self.applied = True

    @property
    def open(self) -> bool:
        return self.state in (RoundState.OPEN, RoundState.COMPLETING)

    def begin(self) -> None:
        self._refuse_open("begin")
        self.state, self.applied = RoundState.OPEN, False

    def complete(self) -> None:
        if not self.open:
            raise RuntimeError(f"complete: a round is {self.state.value[0]}, and none was begun")
        self.state = RoundState.COMPLETING

    def completed(self) -> None:
        if self.state is not RoundState.COMPLETING:
            raise RuntimeError(f"completed: a round is {self.state.value[0]}, and its rest was not launched")
        self.launched += 1
        self.state = RoundState.COMPLETE

    def local(self) -> None:
        self.applied = False
        if self.state is RoundState.COMPLETE:
            self.state = RoundState.DIRTY

    def step(self) -> None:
        self._refuse_open("step")
        self.clear()
        self.zeroed = False

    def clear(self) -> None:
        self._refuse_open("clear")
        self.state = RoundState.UNREDUCED
        self.launched, self.zeroed, self.applied = 0, True, True

    def _refuse_open(self, event: str) -> None:
        if self.open:
            raise RuntimeError(f"a round is {self.state.value[0]}: complete it before {event}")


class Rounds(RoundCounter, Owing):
    """Launches the buckets of each round in order, and completes rounds.

    Attributes:
        next: the bucket that is launched next, of the open round; 0 where none is open.
        buffers: the memory that buckets pack into, and receive in.
        streams: those on which autograd adds to gradients.
        came: by index, the version of each gradient that has come on this rank and no completed round has taken.
        engine: returns the engine that these rounds are a part of; None once that is gone.
    """

    def __init__(
        self,
        layout: Buckets,
        sharding: Sharding,
        readiness: Readiness,
        watch: BackwardWatch,
        schedule: UnitSchedule | None,
        *,
        overlap: bool,
    ) -> None:
        RoundCounter.__init__(self)
        Owing.__init__(self, UserThread() if schedule is None else schedule.thread, watch)
        self._layout, self._sharding, self._readiness = layout, sharding, readiness
        self._schedule, self._overlap = schedule, overlap
        # Rounds with units come first: a rank that waits in a gather of theirs launches nothing until this one joins.
        self.turn = 0 if schedule is not None else 1
        self.buffers = CommBuffers(0, sharding.device)
        self.streams = GradStreams(sharding.device)
        self.next = 0
        self.came: dict[int, int] = {}
        self._zeroed: bool | Tensor = False
        self.engine: Callable[[], object] = lambda: None

    def close(self) -> None:
        super().close()
        if self._schedule is not None:
            self._schedule.prefetch.reducing.discard(self)

    # -- launching -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        self._sharding.world.log.rounds += 1
        self.next = 0

    def launch(self, *, rest: bool) -> None:
        """Launch the buckets that are ready, in order; or the ``rest`` of the round, ready or not."""
        buckets = self._layout.all
        while self.next < len(buckets) and (rest or (self._overlap and self._readiness.may_launch(self.next))):
            # The host must not wait for other ranks within a backward where another optimizer reduces in it, too: in
            # A for rank 1, which uses B alone and waits there for us. At stage 0 every backward ends with a wait, so
            # all ranks have to meet such optimizers in one order anyway.
            may_wait = self._sharding.stage == 0 or not self._sharding.world.contended
            # Under gloo, where the host waits anyway, a reduction at stage 3 waits for the one before: that saves
            # memory. On CUDA the host is ahead of both.
            if self._schedule is not None and self._sharding.host_waits and may_wait:
                self.buffers.deallocate_once_arrived()
                self._schedule.prefetch.reduction_begins(self)
            with torch.no_grad():
                buckets[self.next].launch(self.buffers, self.streams, may_wait=may_wait)
            self.next += 1

    def complete_round(self) -> None:
        """Launch the rest of the open round, or a whole round where none is open. It waits for nothing."""
        if not self.open:
            self.begin()
        self.complete()
        self.launch(rest=True)
        self.completed()
        self.next, self._zeroed = 0, False
        self.came.clear()
        self._readiness.begin()

    def wait_for_averages(self) -> None:
        """Wait, at stage 0, for the reductions: there ``.grad`` is the average, and may be read at once."""
        if self._sharding.stage == 0:
            prefetch_rest_of_backwards(self.thread)
            for bucket in self._layout.all:
                bucket.arrivals.wait()

    def deallocate_idle_buffers(self) -> None:
        """Free the buffers' memory, at stage 3, while no reduction uses it: units take it meanwhile."""
        # On a GPU the host never knows whether one does, and ``idle`` is True: to free the memory makes the stream
        # wait. So there the buffers stay while a round is open, as the backward must go on. They go in ``step``.
        waits_for_nothing = self._sharding.host_waits or not self.open
        if self._schedule is not None and waits_for_nothing and self.buffers.allocated and self.buffers.idle:
            self.buffers.deallocate()
            self._schedule.prefetch.reductions_arrived(self)

    # -- after an exception in backward ----------------------------------------------------------------------------

    @property
    def out_of_step(self) -> bool:
        schedule = self._schedule
        return self._sharding.world.out_of_step or (schedule is not None and schedule.out_of_step)

    def note_again(self) -> None:
        """Note, as a backward begins, what waits for a round since ``no_sync``: edits so far came before it."""
        waiting, self.came = self.came, {}
        for index in waiting:
            if (grad := self._grad(index)) is not None:
                self.came[index] = grad._version

    def _grad(self, index: int) -> Tensor | None:
        bucket, _, slot = self._layout.slot_of[index]
        return bucket.params[slot].grad

    def _zeroed_since_raise(self) -> bool | Tensor:
        """Find whether the user has zeroed all gradients of this rank since the exception, launched or not.

        Returns True where all are None. Returns a tensor, [] bool on the device, where all were written in place: it
        is False if those that are not launched yet are zero. The host does not wait for it.
        """
        grads = {index: self._grad(index) for index in self.came}
        if grads and all(parameter.grad is None for bucket in self._layout.all for parameter in bucket.params):
            return True
        pending = {index: grad for index, grad in grads.items() if self._layout.slot_of[index][1] >= self.next}
        written = [grad for index, grad in pending.items() if grad is not None and grad._version != self.came[index]]
        launched = self._layout.all[: self.next]
        if not grads or len(written) < len(pending) or not all(bucket.written for bucket in launched):
            return False
        nothing = torch.zeros((), dtype=torch.bool, device=self._sharding.device)
        return torch.stack([nothing, *(local_of(grad).detach().ne(0).any() for grad in written)]).any()

    def launch_or_drop(self, *, rest: bool) -> None:
        """Launch buckets, also of a round that an exception has left open.

        Gradients from before it count, unless the user has zeroed all of them since, as by ``module.zero_grad()``.
        Then the averages of buckets that are launched only now are zeroed, too::

            rank 0   backward raises after bucket 0   model.zero_grad()   launches bucket 1, and drops its average
            rank 1   backward                         model.zero_grad()
        """
        first, raised = self.next, self.state is RoundState.OPEN and not self.watch.running
        if raised and self._zeroed is False:
            self._zeroed = self._zeroed_since_raise()  # before a launch puts averages into ``.grad``
        self.launch(rest=rest)
        # At stage 0 averages arrive over what the user has zeroed in place, too.
        first = 0 if self._sharding.stage == 0 else first
        for bucket in self._layout.all[first : self.next] if self._zeroed is not False else ():
            bucket.zero(unless=self._zeroed) if isinstance(self._zeroed, Tensor) else bucket.slots.drop_all()

    def complete_raised(self) -> None:
        self.watch.forget()  # a backward that raised has no end: the next hook belongs to another one
        self._readiness.begin()
        if not self.open:
            return
        self._sharding.world.log.check()
        if self.out_of_step:
            raise RankMismatchError(
                "ranks are out of sync after an earlier error in a backward; make a new optimizer to go on"
            )
        # Gathers first: each launches the buckets of the units that are over by then. Ranks that did not raise have
        # launched in that order.
        if self._schedule is not None:
            self._schedule.complete_raised()
        self.launch_or_drop(rest=True)
        self.complete_round()

    def complete_all_raised(self, *, due: bool = False) -> None:
        """Collective. Complete what exceptions have left open: here, and in all models and optimizers of the thread.

        ``due``: every rank makes this call after its backward. So join all gathers of that, even if it raised here
        before it came to any unit::

            rank 0   backward: raises at once               step: joins the gathers of units 3, 2 and 1
            rank 1   backward: waits to gather unit 3       unit 2   unit 1   step
        """
        self.thread.note()
        self.complete_raised()  # before the others: where a collective has failed, this raises
        if due and self._schedule is not None:
            self._schedule.complete_all_backwards()
        # All optimizers launch before one is waited for, as at stage 0 with the optimizers A and B:
        #     rank 0   backward: raises, before B                A.step(): launches A and B, then waits for A
        #     rank 1   backward: launches both, waits for B      A.step()
        for owing in complete_raised(self.thread):
            if isinstance(owing, Rounds):
                owing.wait_for_averages()
                owing.streams.join()  # autograd does so where a backward ends, and not where it raises

    def complete_missed(self, call: str) -> None:
        """Collective, in a ``call`` that every rank makes after its backward: complete what exceptions have left open,
        then launch as many rounds as any rank has since the last ``step`` or ``zero_grad``.

        A backward that raised before its first gradient has left no trace here, and the others wait for its round.
        """
        self.complete_all_raised(due=True)
        for _ in range(max(self._sharding.world.gather_objects(self.launched, call)) - self.launched):
            self.complete_round()
