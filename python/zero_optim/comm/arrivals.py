"""A queue of the reductions that are on their way into one tensor, and of actions to run once they are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Awaited(Protocol):
    """A collective under way, with the memory that it was lent."""

    def wait(self) -> None: ...

    def arrives_within(self, seconds: float) -> bool: ...


class Arrivals:
    """A queue before a tensor: no write to the tensor overtakes a reduction that is still being received.

    Where several optimizers share ranks, no rank may wait within a backward. So a second reduction into a shard can be
    under way before the first one has arrived, and the user may zero a gradient in between::

        expect(reduction 1)    receives into the shard
        then(zero slot 3)      the user dropped a gradient of the first backward
        expect(reduction 2)    adds to the shard

    ``wait`` does the three in this order. With an empty queue ``then`` acts at once, and costs nothing.
    """

    def __init__(self) -> None:
        self.zeroed = 0  # how often the user has zeroed something of the tensor
        self._queue: deque[Awaited | Callable[[], object]] = deque()

    @property
    def under_way(self) -> bool:
        return bool(self._queue)

    def expect(self, awaited: Awaited) -> None:
        self._queue.append(awaited)

    def then(self, action: Callable[[], object]) -> None:
        """Run ``action`` after what is on its way now."""
        if self._queue:
            self._queue.append(action)
        else:
            action()

    def zero(self, part: Tensor) -> None:
        """Zero ``part`` of the tensor, as the user asked, after what is on its way now."""
        self.zeroed += 1
        self.then(part.zero_)

    def wait(self) -> None:
        """Order what follows after the whole queue. Under gloo the host waits, on CUDA the current stream does."""
        while self._queue:
            first = self._queue[0]
            first() if callable(first) else first.wait()
            self._queue.popleft()  # only now: what failed to arrive is still expected

    def arrive_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for each that is on its way, and tell whether ``wait`` would not hold the host."""
        return all(callable(awaited) or awaited.arrives_within(seconds) for awaited in self._queue)

    def abandon(self) -> None:
        """Wait for nothing any more: the ranks have parted, or the tensor is of no use."""
        self._queue.clear()
