"""Launches rounds of reductions, and completes those that an exception in backward has left open.

A *round* is one synchronised backward's reductions: every bucket once, by ascending index. Between two calls that all
ranks make, they must launch equally many rounds. Each rank derives that number from its own calls, without a message.

After an exception there is one mechanism: the rank completes what it owes, with zeros for the gradients that did not
come, at the next call that all ranks make::

    rank 0   backward raises half-way   OPEN       zero_grad: launches the rest, then clears
    rank 1   backward                   COMPLETE   zero_grad: clears
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..backward_watch import BackwardWatch
from ..comm.handle import CommBuffers
from ..comm.sharding import Sharding
from ..comm.streams import GradStreams
from ..errors import RankMismatchError
from ..units.schedule import UnitSchedule, complete_raised_backwards, prefetch_rest_of_backwards
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
    """The state of a rank's rounds, and how many were completed.

    Attributes:
        launched: rounds since the last ``step`` or ``zero_grad``.
        zeroed: whether ``zero_grad`` was called since the last ``step``.
        applied: whether nothing was accumulated since the last ``step`` or ``zero_grad``: any gradient there is old.
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


_open: list[weakref.ref[Rounds]] = []
"""The rounds of this process's open optimizers, in the order in which they were made.

The list is here because a call completes what an exception has left open in every optimizer of its thread."""


def open_rounds() -> list[Rounds]:
    """List the rounds of all open optimizers of this process, in the order in which they were made."""
    return [rounds for reference in _open if (rounds := reference()) is not None]


class Rounds(RoundCounter):
    """Launches the buckets of each round in order, and completes rounds.

    Attributes:
        next: the bucket that is launched next, of the open round; 0 where none is open.
        buffers: the memory that buckets pack into, and receive in.
        came: whether a gradient has come on this rank that no completed round has taken.
        engine: returns the engine that these rounds are a part of; None once that is gone.
        thread: the thread that trains with the optimizer; at stage 3, that uses the model.
    """

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        layout: Buckets,
        sharding: Sharding,
        readiness: Readiness,
        streams: GradStreams,
        watch: BackwardWatch,
        schedule: UnitSchedule | None,
        thread: UserThread,
        *,
        overlap: bool,
    ) -> None:
        super().__init__()
        self._parameters, self._layout, self._sharding = parameters, layout, sharding
        self._readiness, self._streams, self._watch, self._schedule = readiness, streams, watch, schedule
        self._overlap, self.thread = overlap, thread
        self.buffers = CommBuffers(0, sharding.device)
        self.next = 0
        self.came = False
        self.engine: Callable[[], object] = _nothing
        _open[:] = [weakref.ref(rounds) for rounds in (*open_rounds(), self)]

    def close(self) -> None:
        """Leave what is open here to nobody: the optimizer is closed."""
        _open[:] = [of for of in _open if of() is not self]
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
            may_wait = self._may_wait
            # Under gloo, where the host waits anyway, a reduction at stage 3 waits for the one before: that saves
            # memory. On CUDA the host is ahead of both.
            if self._schedule is not None and self._sharding.host_waits and may_wait:
                self.buffers.deallocate_once_arrived()
                self._schedule.prefetch.reduction_begins(self)
            with torch.no_grad():
                buckets[self.next].launch(self.buffers, self._streams, may_wait=may_wait)
            self.next += 1

    @property
    def _may_wait(self) -> bool:
        """True if the host may wait for other ranks within a backward. Not where another optimizer reduces in it::

            rank 0   uses A alone: waits in A for rank 1
            rank 1   uses B alone: waits in B for rank 0

        At stage 0 it may: every rank has to meet such optimizers in one order, as each backward ends with a wait.
        """
        return self._sharding.stage == 0 or not self._sharding.world.contended

    def complete_round(self, gathers: Callable[[], None]) -> None:
        """Launch the rest of the open round, or a whole round where none is open. It waits for nothing.

        ``gathers`` runs first: at stage 3 it completes the backward's gathers, and the bucket of each unit that is over
        in it is launched. Ranks that did not raise have launched in that order, and wait for us in it.
        """
        if not self.open:
            self.begin()
        self.complete()
        gathers()
        self.launch(rest=True)
        self.completed()
        self.next, self.came = 0, False
        self._readiness.begin()

    def wait_for_averages(self) -> None:
        """Wait, at stage 0, for the reductions: there ``.grad`` is the average, and may be read at once."""
        if self._sharding.stage == 0:
            prefetch_rest_of_backwards(self.thread)
            for bucket in self._layout.all:
                bucket.wait()

    def deallocate_idle_buffers(self) -> None:
        """Free the buffers' memory, at stage 3, while no reduction uses it: units take it meanwhile.

        On a GPU the host never knows whether one does, and ``idle`` is True: to free the memory makes the stream wait.
        So there the buffers stay while a round is open, as the backward must go on. They go in ``step``, or before.
        """
        waits_for_nothing = self._sharding.host_waits or not self.open
        if self._schedule is not None and waits_for_nothing and self.buffers.allocated and self.buffers.idle:
            self.buffers.deallocate()
            self._schedule.prefetch.reductions_arrived(self)

    # -- after an exception in backward ----------------------------------------------------------------------------

    @property
    def raised(self) -> bool:
        """True if an exception has left the round open: its backward does not run any more, and nobody completes it."""
        return self.state is RoundState.OPEN and not self._watch.running

    @property
    def out_of_step(self) -> bool:
        """True if a collective has failed: the other ranks are at another one, and nothing can be completed."""
        schedule = self._schedule
        return self._sharding.world.out_of_step or (schedule is not None and schedule.out_of_step)

    def all_dropped(self) -> bool:
        """True if gradients came, and the user has set every one to None since, as by ``module.zero_grad()``."""
        return self.came and all(parameter.grad is None for parameter in self._parameters.values())

    def complete_raised(self) -> None:
        """Complete a round that an exception has left open: the other ranks have launched theirs.

        Gradients that came before the exception count. Where the user has dropped all of them, averages that arrive
        only now are dropped, too.
        """
        self._watch.forget()  # a backward that raised has no end: the next hook belongs to another one
        self._readiness.begin()
        if not self.open:
            return
        self._sharding.world.log.check()
        if self.out_of_step:
            raise RankMismatchError(
                "ranks are out of sync after an earlier error in a backward; make a new optimizer to go on"
            )
        dropped = self.all_dropped()
        # At stage 3 the schedule meets a new backward before we do, and it has ended the raised one's cycle then. The
        # cycle that is open now belongs to the new backward: to join it here would end that one.
        next_is_under_way = self._schedule is not None and self._schedule.watch.running
        self.complete_round(_nothing if next_is_under_way else self.complete_backward)
        if dropped:
            for bucket in self._layout.all:
                bucket.slots.drop_all()

    def complete_backward(self) -> None:
        """Complete the gathers, at stage 3, of the backward that is open."""
        if self._schedule is not None:
            self._schedule.complete_backward()

    def complete_all_raised(self) -> None:
        """Complete what an exception has left open: here, and in every optimizer that the backward went through.

        Every rank calls this. All optimizers launch before one is waited for. At stage 0, with optimizers A and B::

            rank 0   backward: raises, before B                A.step(): launches A and B, then waits for A
            rank 1   backward: launches both, waits for B      A.step()
        """
        self.thread.note()
        chosen = self.not_in_backward()
        for rounds in chosen:
            rounds.complete_raised()
        # Those under ``no_sync`` have no round, and other ranks wait in their gathers.
        complete_raised_backwards(self.thread)
        for rounds in chosen:  # only now, when all are launched
            rounds.wait_for_averages()
            rounds._streams.join()  # autograd does so where a backward ends, and not where it raises

    def not_in_backward(self) -> list[Rounds]:
        """List these rounds, and those of the thread that no running backward has come to: if open, they have raised.

        Those with units come first: a rank that waits in their gathers launches nothing until we join.
        """
        own = [of for of in open_rounds() if self.thread.may_complete(of.thread)]
        chosen = [of for of in own if of is self or not (of.out_of_step or of._watch.running)]
        return sorted(chosen, key=lambda rounds: rounds._schedule is None)

    def complete_all_backwards(self) -> None:
        """Collective, at a call that every rank makes after its backward. Join all gathers that are left of it.

        Other ranks may wait in them, even if the backward raised here before it came to any unit::

            rank 0   backward: raises at once               step: joins the gathers of units 3, 2 and 1
            rank 1   backward: waits to gather unit 3       unit 2   unit 1   step
        """
        if self._schedule is not None:
            self.complete_raised()
            self._schedule.complete_all_backwards()

    def complete_missed(self, call: str) -> None:
        """Collective. Launch as many rounds as any rank has since the last ``step`` or ``zero_grad``.

        A backward that raised before its first gradient has left no trace here, and the others wait for its round. It
        is looked for in a ``call`` that every rank makes: ``step`` with a closure at stage 3, and the second
        ``zero_grad`` since the last ``step``.
        """
        missed = max(self._sharding.world.gather_objects(self.launched, call)) - self.launched
        for _ in range(missed):
            self.complete_round(_nothing)


def _nothing() -> None:
    pass
