"""Lanes whose copies take effect as late as their marks allow: who forgets to wait finds what was there before.

A copy that is asked for only goes onto its lane. It is made when somebody waits for a mark that was set behind it, or
for one on another lane that comes after that. Until then its target holds no number, where nothing on a lane still
reads what is there. The CPU computes at once, so a mark that it sets has passed::

    lane in      copy page 1 in ── mark a          the frame is NaN until somebody waits for a
    computing                        wait for a    the copy is made now
    lane out                                       wait for b; copy page 1 out: made when somebody waits for this one

A disk is as late: a page is read or written when somebody waits for that.

What comes too early is not found: a lane that does not wait for an update finds it made. The simulated GPU finds both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

NO_NUMBER = 0xFF  # NaN in every floating dtype


class DeferredMark:
    def __init__(self) -> None:
        self.lane: DeferredLane | None = None
        self.place = 0  # on the lane

    def set(self) -> None:
        self.lane = None

    def wait(self) -> None:
        if self.lane is not None:
            self.lane.reach(self.place)

    order_current = wait


class DeferredCopy:
    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source
        torch.autograd.graph.increment_version(target)

    def reads(self, memory: Tensor) -> bool:
        return _overlap(self._source, memory)

    def uses(self, memory: Tensor) -> bool:
        return self.reads(memory) or _overlap(self._target, memory)

    def make(self) -> None:
        if self._source.numel() and not self._source.untyped_storage().nbytes():
            raise AssertionError("memory was dropped that a lane has not copied yet")
        self._target.data.copy_(self._source.data)  # past the version, which has counted the copy already


class DeferredLane:
    def __init__(self, lanes: DeferredLanes) -> None:
        self._lanes = lanes
        self._made = 0
        self._asked: list[Callable[[], None]] = []
        self.copies: list[DeferredCopy] = []  # that are not made yet

    def copy(self, target: Tensor, source: Tensor) -> None:
        copy = DeferredCopy(target, source)
        if not any(other.reads(target) for other in self._lanes.copies()):
            target.data.view(torch.uint8).fill_(NO_NUMBER)
        self.copies.append(copy)
        self._asked.append(self._make_next)

    def after(self, mark: DeferredMark) -> None:
        if mark.lane is not None:
            lane, place = mark.lane, mark.place
            self._asked.append(lambda: lane.reach(place))

    def set(self, mark: DeferredMark) -> None:
        mark.lane, mark.place = self, len(self._asked)

    def as_current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def reach(self, place: int) -> None:
        while self._made < place:
            self._made += 1
            self._asked[self._made - 1]()

    def _make_next(self) -> None:
        self.copies.pop(0).make()


class DeferredLanes:
    """See ``zero_optim.stores.lanes.Lanes``."""

    def __init__(self) -> None:
        self.to_device, self.to_host = DeferredLane(self), DeferredLane(self)

    def copies(self) -> list[DeferredCopy]:
        """That are not made yet."""
        return self.to_device.copies + self.to_host.copies

    def mark(self) -> DeferredMark:
        return DeferredMark()

    def keep(self, memory: Tensor) -> None:
        """Copies that are not made keep their tensors."""


class DeferredTransfer:
    """Of a page to or from a file. It is never made where nobody waits."""

    def __init__(self, make: Callable[[], None]) -> None:
        self._make, self.done = make, False

    def wait(self, seconds: float) -> None:
        if not self.done:
            self.done = True
            self._make()


def _deferred_file() -> type:
    from zero_optim.stores.page_file import PageFile

    class DeferredFile(PageFile):
        def write(self, extent: Any, buffer: Tensor, after: Callable[[], None] | None = None) -> Any:
            real = super().write

            def make() -> None:
                if after is not None:
                    after()
                real(extent, buffer).wait(60.0)

            return DeferredTransfer(make)

        def read(self, extent: Any, buffer: Tensor) -> Any:
            buffer.fill_(NO_NUMBER)
            real = super().read
            return DeferredTransfer(lambda: real(extent, buffer).wait(60.0))

    return DeferredFile


@contextmanager
def deferring() -> Iterator[None]:
    """Stores that are made within it have such lanes and disks. Host memory that a lane still uses may not be
    given back."""
    from zero_optim.stores import disk_homes, make_store
    from zero_optim.stores.host_memory import HostMemory

    made: list[DeferredLanes] = []
    give_back = HostMemory.give_back

    def make(device: torch.device) -> Any:
        made.append(DeferredLanes())
        return made[-1]

    def watched(memory: HostMemory, run: Tensor) -> None:
        if any(copy.uses(run) for lanes in made for copy in lanes.copies()):
            raise AssertionError("host memory is given back that a lane has not copied yet")
        give_back(memory, run)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(make_store, "make_lanes", make))
        patches.enter_context(mock.patch.object(HostMemory, "give_back", watched))
        patches.enter_context(mock.patch.object(disk_homes, "PageFile", _deferred_file()))
        yield


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = _extent(one), _extent(other)
    return first[0] < second[1] and second[0] < first[1]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a contiguous tensor."""
    start = tensor.data_ptr() if tensor.untyped_storage().nbytes() else 0
    return start, start + tensor.nbytes
