"""Reductions over a grid, in two legs: a reduce-scatter within a replica, then an all-reduce of the shard across.

The second leg needs the result of the first. Under NCCL a stream beside the current one waits for that, so both legs
are issued at once, and all is as with one leg. Under gloo only the host can wait. So it issues the second leg when it
next finds that the first one has arrived: at the next reduction, or where it waits::

    launch 1   leg 1 of bucket 1
    launch 2   leg 2 of bucket 1, which has arrived; leg 1 of bucket 2
    step       waits for leg 1 of bucket 2; leg 2 of bucket 2; waits for both

The moment differs from rank to rank; the order does not. Second legs are issued in the order of the first ones, over a
group of their own.

====================  ==========  ==========  =========
event                 WITHIN      ACROSS      ARRIVED
====================  ==========  ==========  =========
go_on, arrived        ACROSS      ACROSS      ARRIVED
go_on, not arrived    WITHIN      ACROSS      ARRIVED
wait                  ARRIVED     ARRIVED     ARRIVED
wait: leg 1 fails     WITHIN      --          --
wait: leg 2 fails     ACROSS      ACROSS      --
====================  ==========  ==========  =========
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from .collectives import Pending


class Leg(enum.Enum):
    """The leg of a reduction that is under way."""

    WITHIN = enum.auto()
    ACROSS = enum.auto()
    ARRIVED = enum.auto()


class Chain:
    """A reduction in two legs, of which the host issues the second. It is awaited as a ``Pending`` is."""

    def __init__(self, queue: ChainQueue, first: Pending, second: Callable[[], Pending]) -> None:
        self._queue, self._pending, self._issue = queue, first, second
        self.leg = Leg.WITHIN

    def wait(self) -> None:
        self._queue.go_on(until=self)
        self._pending.wait()
        self.leg = Leg.ARRIVED

    def arrives_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for each first leg up to this chain's, and for its second leg, and tell whether
        ``wait`` would not hold the host."""
        self._queue.go_on_with_arrived(seconds)
        return self.leg is not Leg.WITHIN and self._pending.arrives_within(seconds)

    def order_current(self) -> bool:
        """Return False, as the host waits; see ``Pending.order_current``."""
        return False

    # -- for the queue -------------------------------------------------------------------------------------------

    def first_arrives_within(self, seconds: float) -> bool:
        return self._pending.arrives_within(seconds)

    def issue_second(self) -> None:
        self._pending.wait()
        self._pending = self._issue()
        self.leg = Leg.ACROSS


class ChainQueue:
    """Chains whose second leg was not issued yet, in the order of their first legs."""

    def __init__(self) -> None:
        self._chains: deque[Chain] = deque()

    def add(self, first: Pending, second: Callable[[], Pending]) -> Chain:
        """Queue a chain; ``second`` issues its second leg."""
        chain = Chain(self, first, second)
        self._chains.append(chain)
        return chain

    def go_on(self, until: Chain) -> None:
        """Issue second legs up to that of ``until``, waiting for first ones, and then those whose first has arrived."""
        while until.leg is Leg.WITHIN:
            self._next()
        self.go_on_with_arrived(0)

    def go_on_with_arrived(self, seconds: float) -> None:
        """Issue second legs in order, as long as the next chain's first leg arrives within ``seconds``."""
        while self._chains and self._chains[0].first_arrives_within(seconds):
            self._next()

    def issue_all(self) -> None:
        """Issue every second leg, waiting for first ones. Afterwards no other rank waits for one of this rank's."""
        while self._chains:
            self._next()

    def _next(self) -> None:
        self._chains[0].issue_second()
        self._chains.popleft()  # only now: where the first leg has failed, whoever waits again hears of it again

    def abandon(self) -> None:
        """Issue nothing any more: the ranks have parted."""
        self._chains.clear()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def issue_behind(first: Pending, second: Callable[[], Pending], device: torch.device) -> Pending:
    """Issue the second leg behind the first, on a stream that waits in place of the current one."""
    with _beside(device):
        first.wait()
        return second()


def _beside(device: torch.device) -> AbstractContextManager[object]:
    """Make the device's stream for second legs the current one. A simulation on the CPU has none."""
    if device.type != "cuda":
        return nullcontext()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return torch.cuda.stream(_streams[device])
