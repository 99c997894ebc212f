"""Copies between host memory and the device, beside the work that the device does.

There are two lanes, one for each direction, which last as long as the store: new streams in every step cost memory
(seen elsewhere: gigabytes a step). Marks order lanes and the computing stream among each other::

    lane in      copy page 1 in ── mark a                    wait for b; copy page 3 into page 1's place
    computing                     wait for a; update page 1 ── mark
    lane out                                                   wait; copy page 1 out ── mark b

On a CPU a copy is over when the call returns, and marks do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..comm.streams import on_device


class Mark:
    """A moment in the order of launched work. A mark that was never set has passed; on a CPU every mark has."""

    def set(self) -> None:
        """Set the mark now, on the current stream."""

    def order_current(self) -> None:
        """Make the current stream wait for the mark."""

    def wait(self) -> None:
        """Block the host until the mark has passed."""


class Lane:
    """Copies that run one after another. On a CPU the caller makes them."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy. Others may touch neither tensor until a mark that was set after the copy has passed."""
        target.copy_(source)

    def after(self, mark: Mark) -> None:
        """Make later work of this lane wait for the mark."""

    def set(self, mark: Mark) -> None:
        """Set the mark after all copies of this lane so far."""

    def as_current(self) -> AbstractContextManager[Any]:
        """Make a context in which this lane is the current stream."""
        return nullcontext()


class Lanes:
    """The two lanes: to the device, and from it."""

    def __init__(self) -> None:
        self.to_device = self.to_host = Lane()

    def mark(self) -> Mark:
        return Mark()

    def keep(self, memory: Tensor) -> None:
        """Call before dropping memory of the device: it is reused only after what the lanes do with it now."""


# -- on a GPU --------------------------------------------------------------------------------------------------------


class _CudaMark(Mark):
    def __init__(self, device: torch.device) -> None:
        self.event, self._device = torch.cuda.Event(blocking=True), device  # a host that waits sleeps

    def set(self) -> None:
        self.event.record(torch.cuda.current_stream(self._device))

    def order_current(self) -> None:
        self.event.wait(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        with on_device(self._device):
            self.event.synchronize()


class _CudaLane(Lane):
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def after(self, mark: _CudaMark) -> None:  # type: ignore[override]
        mark.event.wait(self.stream)

    def set(self, mark: _CudaMark) -> None:  # type: ignore[override]
        mark.event.record(self.stream)

    def as_current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


class CudaLanes(Lanes):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._both = _CudaLane(device), _CudaLane(device)
        self.to_device, self.to_host = self._both

    def mark(self) -> _CudaMark:
        return _CudaMark(self._device)

    def keep(self, memory: Tensor) -> None:
        for lane in self._both:
            memory.record_stream(lane.stream)


def make_lanes(device: torch.device) -> Lanes:
    return CudaLanes(device) if device.type == "cuda" else Lanes()
