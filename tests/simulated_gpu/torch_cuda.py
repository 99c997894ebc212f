"""Replaces functions of ``torch.cuda``. ``switch.running`` installs it once the device is loaded.

torch built for the CPU has no C++ behind ``torch.cuda``. Streams and events here are torch's own classes for any
device, ``torch.Stream`` and ``torch.Event``, which ask the device that is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .device import call

DEVICE = torch.device("cuda", int(os.environ.get("SIMULATED_GPU_NUMBER", 0)))
TOTAL_BYTES = 2**30  # as mem_get_info reports it; an allocation beyond it succeeds
NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered

_resize_of_host = torch.UntypedStorage.resize_
_clone_of_host = torch.UntypedStorage.clone


class Stream(torch.Stream):
    """As ``torch.cuda.Stream``. The priority changes nothing."""

    def __new__(cls, device: Any = None, priority: int = 0, **existing: Any) -> Stream:
        if existing:  # stream_id, device_index, device_type
            return super().__new__(cls, **existing)
        check(device)
        return super().__new__(cls, DEVICE)

    @classmethod
    def of(cls, stream_id: int) -> Stream:
        device_type = torch._C._autograd.DeviceType.CUDA.value
        return cls(stream_id=stream_id, device_index=DEVICE.index, device_type=device_type)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """As ``torch.cuda.Event``, without times."""

    def __new__(cls, blocking: bool = False) -> Event:
        return super().__new__(cls, DEVICE, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def query(self) -> bool:
        check(None)  # CUDA asks the current device
        return super().query()

    def synchronize(self) -> None:
        check(None)
        super().synchronize()


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """As ``torch.cuda.stream``: the stream and its device are current inside; None changes nothing."""
    if stream is None:
        yield
        return
    with device(DEVICE):
        before = current_stream()
        torch._C._accelerator_setStream(stream)
        try:
            yield
        finally:
            torch._C._accelerator_setStream(before)


class device:
    """As ``torch.cuda.device``: it is current inside; None changes nothing. torch asks for instances of it."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_getDeviceIndex()
        set_device(self._device)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


class Runtime:
    """As ``torch.cuda.cudart()``, the calls that pin memory. They return a status, 0 for success."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        check(None)
        call("pin", address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        check(None)
        return 0 if call("unpin", address) else NOT_REGISTERED


def current_stream(device: Any = None) -> Stream:
    check(device)
    return Stream.of(torch._C._accelerator_getStream(DEVICE.index).stream_id)


def synchronize(device: Any = None) -> None:
    check(device)
    torch._C._accelerator_synchronizeDevice(DEVICE.index)


def set_device(device: Any) -> None:
    index = _index_of(device)
    if index is not None:
        torch._C._accelerator_setDeviceIndex(index)


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors ask for, without torch's rounding."""
    check(device)
    return call("bytes")[0]


def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage | None:
    if self.device.type != "cuda":
        return _resize_of_host(self, size)
    call("resize_storage", self, size)
    return self


def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """For ``copy.deepcopy`` of a tensor: torch's own clone makes no storage of this device."""
    if self.device.type != "cuda":
        return _clone_of_host(self)
    whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(self, 0, (self.nbytes(),), (1,))
    return whole.clone().untyped_storage()


REPLACED: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": stream,
    "device": device,
    "current_stream": current_stream,
    "default_stream": lambda device=None: (check(device), Stream.of(0))[1],
    "set_stream": lambda stream: torch._C._accelerator_setStream(stream),
    "synchronize": synchronize,
    "set_device": set_device,
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": lambda device=None: call("bytes")[1],
    "reset_peak_memory_stats": lambda device=None: call("reset_peak"),
    "mem_get_info": lambda device=None: (TOTAL_BYTES - memory_allocated(device), TOTAL_BYTES),
    "cudart": Runtime,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: DEVICE.index + 1,
    "current_device": lambda: torch._C._accelerator_getDeviceIndex(),
    "is_current_stream_capturing": lambda: check(None) is not None,
    "empty_cache": lambda: None,
    "_sleep": lambda cycles: None,
    "_lazy_init": lambda: None,
    "_lazy_call": lambda call, **_: call(),
    "_is_in_bad_fork": lambda: False,
    "default_generators": (torch.default_generator,) * (DEVICE.index + 1),  # random numbers are the host's
}


def install() -> None:
    """Replace each name in ``torch.cuda`` and in its modules, which import each other's names."""
    if torch.UntypedStorage.resize_ is resize_:
        return
    for name, new in REPLACED.items():
        old = getattr(torch.cuda, name)
        for module_name, module in list(sys.modules.items()):
            if f"{module_name}.".startswith("torch.cuda.") and vars(module).get(name) is old:
                setattr(module, name, new)
    torch.UntypedStorage.resize_ = resize_
    torch.UntypedStorage.clone = clone


def check(device: Any) -> None:
    """Raise where a device is named that is not this rank's. None: the current one."""
    index = _index_of(device)
    index = torch._C._accelerator_getDeviceIndex() if index is None else index
    if index != DEVICE.index:
        raise RuntimeError(f"GPU {index} is used, and not GPU {DEVICE.index}, which is the rank's")


def _index_of(device: Any) -> int | None:
    """None: the current one. Raises where a device is named that is not there."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index in (None, -1):
        return None
    if not 0 <= index <= DEVICE.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal: the simulated machine has no device {index}")
    return index
