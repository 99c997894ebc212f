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

    event: torch.cuda.Event | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        if device is not None and device.type == "cuda":
            self.event = torch.cuda.Event(blocking=True)  # a host that waits sleeps

    def set(self) -> None:
        """Set the mark now, on the current stream."""
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(self._device))

    def order_current(self) -> None:
        """Make the current stream wait for the mark."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Block the host until the mark has passed."""
        if self.event is None:
            return
        with on_device(self._device):
            self.event.synchronize()


class Lane:
    """Copies that run one after another. On a CPU, where there is no stream, the caller makes them."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy. Others may touch neither tensor until a mark that was set after the copy has passed."""
        with self.as_current():
            target.copy_(source, non_blocking=True)

    def after(self, mark: Mark) -> None:
        """Make later work of this lane wait for the mark."""
        if self.stream is not None and mark.event is not None:
            mark.event.wait(self.stream)

    def set(self, mark: Mark) -> None:
        """Set the mark after all copies of this lane so far."""
        if self.stream is not None and mark.event is not None:
            mark.event.record(self.stream)

    def as_current(self) -> AbstractContextManager[Any]:
        """Make a context in which this lane is the current stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Lanes:
    """The two lanes of a device: to it, and from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self.to_device, self.to_host = map(Lane, streams)

    def mark(self) -> Mark:
        return Mark(self._device)

    def keep(self, memory: Tensor) -> None:
        """Call before dropping memory of the device: it is reused only after what the lanes do with it now."""
        for lane in (self.to_device, self.to_host):
            if lane.stream is not None:
                memory.record_stream(lane.stream)
