"""Collectives in flight: the handle of each, and the buffers that reductions are packed into and received in."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CollectiveError
from .streams import allocate, deallocate, keep_for_current_stream

PATIENCE_SECONDS = 2.0
"""The longest wait of a rank for a buffer, before it makes another. Ranks of a healthy job differ by far less."""

COUNT = 2
"""Number of buffers: one is packed into, or received in, while the contents of the other are in flight."""


class Work(Protocol):
    """An asynchronous collective, as ``torch.distributed`` returns it."""

    def wait(self, timeout: timedelta = ...) -> object: ...

    def is_completed(self) -> bool: ...


class Watch(Protocol):
    """Waits on the host for a collective, and raises where the ranks are deadlocked: see ``deadlock``."""

    def hold(self, handle: Handle, work: Work) -> None: ...


@dataclass
class Traffic:
    """An account of one kind of collective.

    Attributes:
        bytes: of the whole tensor of each call, added up. On the wire a rank sends and receives (N-1)/N of them, and
            twice that for an all-reduce.
        wait_seconds: time that the host has spent in ``Handle.wait``.
    """

    kind: str
    calls: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


class Handle:
    """An issued collective: its work, its event, and what happens on arrival.

    ``wait`` orders later work after the collective: under NCCL the current stream waits and the host goes on; under
    gloo the host blocks. It may be called any number of times: the first call runs what happens on arrival.

    Attributes:
        on_arrival: what is left to do with the result; None: nothing.
        of: the unit that the collective is for, in messages; None: the whole optimizer or model.
        traffic: its account.
        watch: waits for it where the host waits; None: the current stream waits.
        call: that every rank has to make, in messages; "": none in particular.
    """

    def __init__(self, work: Work, on_arrival: Callable[[], object] | None = None) -> None:
        self._work: Work | None = work
        self.on_arrival = on_arrival
        self._then: deque[Callable[[], object]] = deque()
        self._second: Callable[[], Handle] | None = None  # issues the second leg, over a grid
        self._legs: SecondLegs | None = None
        self.of: str | None = None
        self.traffic = Traffic("a collective")
        self.watch: Watch | None = None
        self.call = ""

    def then(self, action: Callable[[], object]) -> None:
        """Run ``action`` on arrival, after the actions before it."""
        self._then.append(action)

    def wait(self) -> None:
        """Order later work after the arrival. Raises CollectiveError where the collective has failed."""
        if self._legs is not None:
            self._legs.issue(until=self)
        self._wait_for_leg()
        while self._then:
            self._then.popleft()()

    def arrives_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``, and return whether ``wait`` would return at once. Always True where the current
        stream waits. Of two legs: wait so long for each first leg up to its own, and for its second."""
        if self._legs is not None:
            self._legs.issue_arrived(seconds)
        return self._second is None and self.leg_arrives_within(seconds)

    def leg_arrives_within(self, seconds: float) -> bool:
        """``arrives_within`` for the leg that is in flight."""
        # A stream waits: whether it has arrived differs from rank to rank, and must not decide what is launched next.
        if self._work is None or self.watch is None or self._work.is_completed():
            return True
        if seconds > 0:
            with suppress(RuntimeError):  # in time or not, ``wait`` raises what there is to raise
                self._work.wait(timedelta(seconds=seconds))
        return self._work.is_completed()

    def order_current(self) -> bool:
        """Order later work on the current stream after the collective, though another stream will ``wait`` for it.
        Returns False, and does nothing, where the host waits, or where something has to run on arrival."""
        # ``_work`` stays: the other stream has to wait for it as well.
        if self.watch is not None or self.on_arrival is not None or self._then or self._work is None:
            return False
        self._work.wait()
        return True

    def _wait_for_leg(self) -> None:
        if self._work is None:
            return
        start = time.perf_counter()
        if self.watch is not None:
            self.watch.hold(self, self._work)
        else:
            try:
                self._work.wait()  # the current stream waits; the host goes on
            except RuntimeError as error:
                raise CollectiveError(did_not_complete(self.traffic.kind, error, self.call)) from error
        self._work = None  # only now: after a time-out it has not arrived, however often one asks
        self.traffic.wait_seconds += time.perf_counter() - start
        on_arrival, self.on_arrival = self.on_arrival, None
        if on_arrival is not None:
            on_arrival()


def did_not_complete(kind: str, error: Exception, call: str = "") -> str:
    """The message for a collective that has failed. ``call``: that every rank has to make; "": none in particular."""
    remedy = (
        f"every rank has to call {call}, at the same place in its program"
        if call
        else "each must make as many synchronised backwards, and the same calls of step and clip_grad_norm_; at "
        "stage 3 as many forwards, too"
    )
    return (
        f"{kind} did not complete: {error}. Another rank died, raised, or does not take part: {remedy}. "
        "The first error of any rank is the cause"
    )


class SecondLegs:
    """Collectives over a grid (HSDP) under gloo whose second leg is not issued yet, in the order of their first legs.

    The all-reduce across replicas needs the result of the reduce-scatter within one, and only the host can wait for it.
    So it issues the second leg when it next finds the first one arrived: at the next reduction, or where it waits::

        launch 1   leg 1 of bucket 1
        launch 2   leg 2 of bucket 1, which has arrived; leg 1 of bucket 2
        step       waits for leg 1 of bucket 2; leg 2 of bucket 2; waits for both

    With state over all ranks gathers wait in another queue: their first leg is across replicas. The moment differs from
    rank to rank; the order does not. Whoever issues something else over the group of the second legs issues them first.
    """

    def __init__(self) -> None:
        self._waiting: deque[Handle] = deque()

    def add(self, first: Handle, second: Callable[[], Handle]) -> Handle:
        """Queue ``first``; ``second`` issues its second leg. Returns the handle of both."""
        first._second, first._legs = second, self
        self._waiting.append(first)
        return first

    def issue(self, until: Handle | None = None) -> None:
        """Wait for first legs and issue second ones, up to that of ``until``, or all; then those whose first leg has
        arrived. After all, no other rank waits for a second leg of this rank's."""
        while self._waiting and (until is None or until in self._waiting):
            self._next()
        self.issue_arrived(0)

    def issue_arrived(self, seconds: float) -> None:
        """Issue second legs in order, as long as the next first leg arrives within ``seconds``."""
        while self._waiting and self._waiting[0].leg_arrives_within(seconds):
            self._next()

    def _next(self) -> None:
        first = self._waiting[0]
        assert first._second is not None
        first._wait_for_leg()
        second = first._second()
        # From here on the handle is that of the second leg.
        first._work, first.on_arrival, first.watch = second._work, second.on_arrival, second.watch
        first.traffic, first.call, first._second = second.traffic, second.call, None
        self._waiting.popleft()  # only now: where the first leg has failed, the next wait raises again

    def abandon(self) -> None:
        """Issue nothing any more: the ranks are out of sync."""
        self._waiting.clear()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def issue_behind(first: Handle, second: Callable[[], Handle], device: torch.device) -> Handle:
    """Issue the second leg behind the first. On a GPU both are issued at once."""
    beside: AbstractContextManager[object] = nullcontext()  # a simulation on the CPU has no streams
    if device.type == "cuda":
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        beside = torch.cuda.stream(_streams[device])
    # The stream beside the current one waits for the first leg; the current stream goes on with the backward.
    with beside:
        first.wait()
        return second()


class Arrivals:
    """The reductions in flight into one tensor, in order: no write to the tensor overtakes one of them.

    Where several optimizers use the same ranks, no rank may wait within a backward. So a second reduction into a shard
    can be in flight before the first one has arrived, and the user may zero a gradient in between: that runs as the
    first one arrives. With nothing in flight ``then`` acts at once.
    """

    def __init__(self) -> None:
        self.zeroed = 0  # how often the user has zeroed something of the tensor
        self._handles: deque[Handle] = deque()

    @property
    def in_flight(self) -> bool:
        return bool(self._handles)

    def expect(self, handle: Handle) -> None:
        self._handles.append(handle)

    def then(self, action: Callable[[], object]) -> None:
        """Run ``action`` after what is in flight now."""
        if self._handles:
            self._handles[-1].then(action)
        else:
            action()

    def zero(self, part: Tensor) -> None:
        """Zero ``part`` of the tensor, as the user asked, after what is in flight now."""
        self.zeroed += 1
        self.then(part.zero_)

    def wait(self) -> None:
        """Order later work after all of it. Under gloo the host waits, on CUDA the current stream does."""
        while self._handles:
            self._handles[0].wait()
            self._handles.popleft()  # only now: what failed to arrive is still expected

    def arrives_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for each that is in flight, and return whether ``wait`` would not hold the host."""
        return all(handle.arrives_within(seconds) for handle in self._handles)

    def abandon(self) -> None:
        """Wait for nothing any more: the ranks are out of sync, or the tensor is of no use."""
        self._handles.clear()


class CommBuffers:
    """Two buffers, at most as large as the largest bucket, lent in turn, each for one bucket's reductions. Taking a
    buffer waits for the reductions that it was lent for last.

    Two cases in which a rank must not wait get memory of their own, which goes when the reduction has arrived:

    - *Several optimizers on these ranks.* In one backward, rank 0 may use the parameters of the first alone and rank 1
      those of the second. Rank 0 would wait for rank 1 in the first, and rank 1 for rank 0 in the second, for ever.
      All gradients may be in flight at once there: their memory, in the dtype of the reduction, is the price.
    - *Under gloo, a rank has waited for* ``PATIENCE_SECONDS``. Another rank may have raised. It takes part again only
      at the next call of ``zero_grad``, which this rank has to reach, too.

    With ``ZERO_OPTIM_DEBUG=poison`` a buffer is overwritten with NaN once it was used, which shows later reads.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storages = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(COUNT)]
        self._lent_for: list[Arrivals | None] = [None] * COUNT
        self._given_up: Arrivals | None = None  # what has used up the patience
        self._extra = 0  # bytes lent beside the two
        self._peak = 0  # the most bytes that there were as one was taken
        self.allocated = True
        self.poison = "poison" in debug_options()

    def take(self, arrivals: Arrivals, numel: int, dtype: torch.dtype, *, may_wait: bool = True) -> Tensor:
        """Lend a buffer [numel], its contents undefined, until ``give_back``. ``arrivals``: of the bucket."""
        nbytes = numel * dtype.itemsize
        # See the class: a wait here could be for ever. So this reduction gets memory of its own.
        if not may_wait or not self._arrives(self._lent_for[1]):
            self._extra += nbytes
            self._peak = self.peak_nbytes()
            return torch.empty(numel, dtype=dtype, device=self.storages[0].device)
        self.storages.reverse()
        self._lent_for.reverse()
        if self._lent_for[0] is not None:
            self._lent_for[0].wait()
        self._lent_for[0] = arrivals
        if self.storages[0].nbytes < nbytes:  # of a bucket that is reduced without a copy as a rule
            keep_for_current_stream(self.storages[0])
            self.storages[0] = torch.empty(nbytes, dtype=torch.uint8, device=self.storages[0].device)
        allocate(self.storages[0], nbytes)
        self.allocated = True
        self._peak = self.peak_nbytes()
        return self.storages[0][:nbytes].view(dtype)

    def deallocate_once_arrived(self) -> None:
        """Call ``deallocate`` if all that was lent arrives within ``PATIENCE_SECONDS``."""
        if self.allocated and all(map(self._arrives, self._lent_for)):
            self.deallocate()

    def _arrives(self, arrivals: Arrivals | None) -> bool:
        """Wait up to ``PATIENCE_SECONDS``, and return whether these reductions have arrived."""
        if arrivals is None or arrivals.arrives_within(0):
            return True
        # The same rank is still missing: waiting once more, for another bucket, would gain nothing.
        if self._given_up is not None and not self._given_up.arrives_within(0):
            return False
        arrives = arrivals.arrives_within(PATIENCE_SECONDS)
        self._given_up = None if arrives else arrivals
        return arrives

    def give_back(self, buffer: Tensor) -> None:
        """Take ``buffer`` back: its reduction has arrived, and nothing in it is needed any more."""
        if self.poison:
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every float dtype
        if all(buffer.data_ptr() != storage.data_ptr() for storage in self.storages):
            keep_for_current_stream(buffer)  # which has waited for the reduction
            self._extra -= buffer.nbytes

    def nbytes(self) -> int:
        return self._extra + sum(storage.untyped_storage().nbytes() for storage in self.storages)

    def peak_nbytes(self) -> int:
        """The most bytes so far."""
        return max(self._peak, self.nbytes())

    def deallocate(self) -> None:
        """Free the memory until a buffer is taken again, after waiting for what was lent."""
        for arrivals in filter(None, self._lent_for):
            arrivals.wait()
        self._lent_for = [None] * COUNT
        self.allocated = False
        for storage in self.storages:
            deallocate(storage)

    def reallocate(self) -> None:
        """Take the memory of ``deallocate`` again now: it may not be there later."""
        for storage in self.storages:
            allocate(storage)
        self.allocated = True

    @property
    def idle(self) -> bool:
        """Whether taking a buffer would not wait."""
        return all(arrivals.arrives_within(0) for arrivals in filter(None, self._lent_for))


def debug_options() -> set[str]:
    """Read ``ZERO_OPTIM_DEBUG``, a comma-separated list. Raises ValueError for an unknown word."""
    options = {word.strip() for word in os.environ.get("ZERO_OPTIM_DEBUG", "").split(",")} - {""}
    if unknown := options - {"poison", "edits"}:
        raise ValueError(f"ZERO_OPTIM_DEBUG holds {sorted(unknown)}: it knows 'poison' and 'edits'")
    return options
