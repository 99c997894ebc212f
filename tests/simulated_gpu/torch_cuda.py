"""What takes the place of functions in ``torch.cuda``. Imported by ``device.install``, after the device is loaded.

torch built for the CPU has no C++ behind ``torch.cuda``. Streams and events here are torch's own classes for any
device, ``torch.Stream`` and ``torch.Event``, which ask the device that is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .device import call, counts

DEVICE = torch.device("cuda", int(os.environ.get("SIMULATED_GPU_NUMBER", 0)))
NAME = "simulated GPU"
TOTAL_BYTES = 2**30
"""Of the device's memory, as it tells. Nothing is refused beyond it."""
BEFORE_TORCHS_OWN = 15  # torch.load asks in order: the one for CUDA is 20

_resize_of_host = torch.UntypedStorage.resize_
_clone_of_host = torch.UntypedStorage.clone


class Stream(torch.Stream):
    """As ``torch.cuda.Stream``: the next of 32 of its priority."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if given:  # of a stream that is there: stream_id, device_index, device_type
            return super().__new__(cls, **given)
        _check(device)
        return super().__new__(cls, DEVICE, priority=priority)

    @classmethod
    def of(cls, stream_id: int) -> Stream:
        device_type = torch._C._autograd.DeviceType.CUDA.value
        return cls(stream_id=stream_id, device_index=DEVICE.index, device_type=device_type)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={DEVICE} number={self.stream_id}>"


class Event(torch.Event):
    """As ``torch.cuda.Event``. ``elapsed_time`` is the host's, as kernels run there."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, DEVICE, enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def query(self) -> bool:
        _check(None)  # CUDA asks the current device
        return super().query()

    def synchronize(self) -> None:
        _check(None)
        super().synchronize()


class stream:
    """As ``torch.cuda.stream``: the stream and its device are the current ones inside; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._device = device(None if stream is None else DEVICE)

    def __enter__(self) -> None:
        self._device.__enter__()
        if self.stream is not None:
            self._before = current_stream()
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            set_stream(self._before)
        self._device.__exit__(*error)


class device:
    """As ``torch.cuda.device``: it is the current one inside; None changes nothing."""

    def __init__(self, device: Any) -> None:
        self._index = _index_of(device)

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_getDeviceIndex()
        set_device(self._before if self._index is None else self._index)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


class device_of(device):
    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.device if tensor.is_cuda else None)


def current_stream(device: Any = None) -> Stream:
    _check(device)
    return Stream.of(torch._C._accelerator_getStream(DEVICE.index).stream_id)


def default_stream(device: Any = None) -> Stream:
    _check(device)
    return Stream.of(0)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


def synchronize(device: Any = None) -> None:
    _check(device)
    torch._C._accelerator_synchronizeDevice(DEVICE.index)


def set_device(device: Any) -> None:
    index = _index_of(device)
    if index is not None:
        torch._C._accelerator_setDeviceIndex(index)


def get_device_name(device: Any = None) -> str:
    _check(device)
    return NAME


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """The name alone: there is nothing else to tell."""
    _check(device)
    return SimpleNamespace(name=NAME)


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors ask for; torch's rounds each up."""
    _check(device)
    return counts().bytes


def max_memory_allocated(device: Any = None) -> int:
    _check(device)
    return counts().peak_bytes


def reset_peak_memory_stats(device: Any = None) -> None:
    _check(device)
    call("reset_peak")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that tensors have left, and all."""
    return TOTAL_BYTES - memory_allocated(device), TOTAL_BYTES


class Runtime:
    """As ``torch.cuda.cudart()``, the calls for memory of the host. They give a status, 0 where all is well."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        _check(None)
        call("pin", address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        _check(None)
        return 0 if call("unpin", address) else _NOT_REGISTERED


_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage | None:
    """torch's own knows no device in a build for the CPU."""
    if self.device.type != "cuda":
        return _resize_of_host(self, size)
    call("resize_storage", self, size)
    return self


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """For ``torch.load``, what was saved on the device; None for other locations."""
    if not location.startswith(DEVICE.type):
        return None
    _check(location)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).to(DEVICE).untyped_storage()


def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """As ``copy.deepcopy`` of a tensor asks for. torch's own makes storages of devices that it was built for."""
    if self.device.type != "cuda":
        return _clone_of_host(self)
    whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(self, 0, (self.nbytes(),), (1,))
    return whole.clone().untyped_storage()


REPLACED: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": stream,
    "StreamContext": stream,
    "device": device,
    "device_of": device_of,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "set_stream": set_stream,
    "synchronize": synchronize,
    "set_device": set_device,
    "get_device_name": get_device_name,
    "get_device_properties": get_device_properties,
    "memory_allocated": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "memory_reserved": memory_allocated,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "mem_get_info": mem_get_info,
    "cudart": Runtime,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: DEVICE.index + 1,
    "current_device": lambda: torch._C._accelerator_getDeviceIndex(),
    "is_current_stream_capturing": lambda: _check(None) is not None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "empty_cache": lambda: None,
    "_sleep": lambda cycles: None,
    "_lazy_init": lambda: None,
    "_lazy_call": lambda call, **_: call(),
    "_is_in_bad_fork": lambda: False,
    # Random numbers are the host's, and so is their state.
    "default_generators": (torch.default_generator,) * (DEVICE.index + 1),
}

ABSENT = (
    "max_memory_reserved",
    "memory_stats",
    "memory_summary",
    "memory_snapshot",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "get_device_capability",
    "graph_pool_handle",
    "CUDAGraph",
    "graph",
    "make_graphed_callables",
)
"""What raises NotImplementedError when it is called: graphs, and what only a real allocator knows."""


def install() -> None:
    if torch.UntypedStorage.resize_ is resize_:
        return
    for name, new in REPLACED.items():
        _replace(name, new)
    for name in ABSENT:
        _replace(name, _absent(name))
    torch.UntypedStorage.resize_ = resize_
    torch.UntypedStorage.clone = clone
    torch.serialization.register_package(BEFORE_TORCHS_OWN, lambda storage: None, _restored)


def _replace(name: str, new: Any) -> None:
    """In ``torch.cuda``, and in its modules, which import each other's names."""
    old = getattr(torch.cuda, name)
    for module_name, module in list(sys.modules.items()):
        if f"{module_name}.".startswith("torch.cuda.") and vars(module).get(name) is old:
            setattr(module, name, new)


def _absent(name: str) -> Callable[..., Any]:
    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the simulated GPU has no torch.cuda.{name}")

    return absent


def _index_of(device: Any) -> int | None:
    """None: the current one. Raises where a device is named that is not there."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index in (None, -1):
        return None
    if not 0 <= index <= DEVICE.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal: the simulated machine has no device {index}")
    return index


def _check(device: Any) -> None:
    """Raise where a device is named that is not there, or is not this rank's. None: the current one."""
    index = _index_of(device)
    index = torch._C._accelerator_getDeviceIndex() if index is None else index
    if index != DEVICE.index:
        raise RuntimeError(f"GPU {index} is used, and not GPU {DEVICE.index}, which is the rank's")
