"""Copies between host memory and the device, beside the work that the device does.

There are two lanes, one for each direction, which last as long as the store: streams made anew every step cost memory
(seen elsewhere: gigabytes a step). What must come before what is said by marks::

    lane in      copy page 1 in ── mark a                    wait for b; copy page 3 into page 1's place
    computing                     wait for a; update page 1 ── mark
    lane out                                                   wait; copy page 1 out ── mark b

On a CPU a copy is over when the call returns, and marks do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.streams import on_device


class Mark(Protocol):
    """A moment in the order of what was launched. One that was never set has passed."""

    def set(self) -> None:
        """Set it now, on the stream that computes."""

    def order_current(self) -> None:
        """Order what follows on the stream that computes after it."""

    def wait(self) -> None:
        """Let the host wait until it has passed."""


class Lane(Protocol):
    """Copies that follow each other."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Neither may be touched by others until a mark set after it has passed."""

    def after(self, mark: Mark) -> None:
        """Order what follows on this lane after the mark."""

    def set(self, mark: Mark) -> None:
        """Set the mark here, after what was copied so far."""

    def as_current(self) -> AbstractContextManager[Any]:
        """Within it this is the current stream."""


class Lanes(Protocol):
    """The two lanes: to the device, and from it."""

    @property
    def to_device(self) -> Lane: ...

    @property
    def to_host(self) -> Lane: ...

    def mark(self) -> Mark: ...

    def keep(self, memory: Tensor) -> None:
        """Before memory of the device is dropped: what the lanes do with it comes before other uses of it."""


# -- on a GPU --------------------------------------------------------------------------------------------------------


class _CudaMark:
    def __init__(self, device: torch.device) -> None:
        self.event, self._device = torch.cuda.Event(blocking=True), device  # a host that waits leaves its core alone

    def set(self) -> None:
        self.event.record(torch.cuda.current_stream(self._device))

    def order_current(self) -> None:
        self.event.wait(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        with on_device(self._device):
            self.event.synchronize()


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def after(self, mark: _CudaMark) -> None:
        mark.event.wait(self.stream)

    def set(self, mark: _CudaMark) -> None:
        mark.event.record(self.stream)

    def as_current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


class CudaLanes:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.to_device, self.to_host = _CudaLane(device), _CudaLane(device)

    def mark(self) -> _CudaMark:
        return _CudaMark(self._device)

    def keep(self, memory: Tensor) -> None:
        for lane in (self.to_device, self.to_host):
            memory.record_stream(lane.stream)


# -- on a CPU --------------------------------------------------------------------------------------------------------


class _PassedMark:
    def set(self) -> None: ...
    def order_current(self) -> None: ...
    def wait(self) -> None: ...


@dataclass(frozen=True)
class _CallersLane:
    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def after(self, mark: Mark) -> None: ...
    def set(self, mark: Mark) -> None: ...

    def as_current(self) -> AbstractContextManager[Any]:
        return nullcontext()


class HostLanes:
    """Each copy at once, by who asks for it."""

    to_device = to_host = _CallersLane()

    def mark(self) -> _PassedMark:
        return _PassedMark()

    def keep(self, memory: Tensor) -> None: ...


def make_lanes(device: torch.device) -> Lanes:
    return CudaLanes(device) if device.type == "cuda" else HostLanes()  # type: ignore[return-value]
