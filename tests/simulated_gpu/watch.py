"""What the device cannot see by itself, and what brings a CPU program to it: used by ``switch.running``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .device import call, host_access
from .torch_cuda import DEVICE, Event, Stream

_CONSTRUCTORS = _device_constructors()
# Operators that look at a tensor's description, and not at its values.
_DESCRIBES = {"_has_compatible_shallow_copy_type", "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty"}
_DESCRIBES |= {"new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "set_"}
_DESCRIBES |= {"zeros_like"}


@contextmanager
def watching() -> Iterator[None]:
    """Tensors of the program are on the device, and the host's uses of pinned memory are recorded."""
    from zero_optim.comm.streams import HostCopy

    read = HostCopy.read

    def recorded_read(copy: HostCopy, *, wait: bool) -> list[float] | None:
        """The library reads a HostCopy past torch's operators."""
        values = read(copy, wait=wait)
        if values is not None and not copy.immediate:
            host_access(copy._host, False, "HostCopy.read")
        return values

    with _OnDevice(), _HostWatch(), _disk_watch(), mock.patch.object(HostCopy, "read", recorded_read):
        yield


@contextmanager
def _disk_watch() -> Iterator[None]:
    """A read from a disk writes its buffer on a stream of its own, as late as possible: until the host waits for it."""
    from zero_optim.stores.disk_pages import DiskBacking, DiskPage

    begin_read, wait_for = DiskPage.begin_read, DiskBacking.wait_for
    stream = Stream.of(call("new_stream"))
    reading: dict[DiskPage, Event] = {}

    def begins(page: DiskPage) -> None:
        begin_read(page)
        call("launch", stream.stream_id)
        call("touch", page._bytes(page.space), True, stream.stream_id, "a read from the disk")
        reading[page] = stream.record_event()

    def waits(backing: DiskBacking, page: DiskPage, verb: str) -> list[int]:
        checksums = wait_for(backing, page, verb)
        if page in reading:
            reading.pop(page).synchronize()
        return checksums

    with mock.patch.object(DiskPage, "begin_read", begins), mock.patch.object(DiskBacking, "wait_for", waits):
        yield


class _OnDevice(TorchFunctionMode):
    """Makes tensors for which no device is named on the host, and moves them to the device.

    So programs written for the CPU run on it, with the same random numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _CONSTRUCTORS:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None or "out" in kwargs:
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        trains = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs, device=None if func is torch.as_tensor else "cpu")
        return made.to(DEVICE).requires_grad_(trains) if isinstance(made, Tensor) else made


class _HostWatch(TorchDispatchMode):
    """Records where an operator on the CPU reads or writes pinned memory. The device knows of copies from and to it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        used = list(_uses(func, args, kwargs or {}))
        if not any(tensor.is_cuda for _, tensor, _ in used):
            for what, tensor, write in used:
                if tensor.numel() and tensor.is_pinned():
                    host_access(tensor, write, what)
        return func(*args, **(kwargs or {}))


@functools.cache
def _used_arguments(func: Any) -> tuple[tuple[int, str, str, bool], ...]:
    """The operator's arguments whose values it uses: place, name, "op(argument)", and whether it is written.

    A view uses nothing: it only describes memory.
    """
    schema = func._schema
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    views = not any(writes) and any(result.alias_info is not None for result in schema.returns)
    if views or schema.name.split("::")[1] in _DESCRIBES:
        return ()
    return tuple(
        (place, argument.name, f"{schema.name}({argument.name})", write)
        for place, (argument, write) in enumerate(zip(schema.arguments, writes, strict=True))
        if "Tensor" in str(argument.type)
    )


def _uses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, bool]]:
    """Every plain, dense tensor that the operator uses: "op(argument)", the tensor, and whether it is written."""
    for place, name, what, write in _used_arguments(func):
        given = args[place] if place < len(args) else kwargs.get(name)
        for tensor in (given,) if isinstance(given, Tensor) else tree_leaves(given):
            plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
            if plain and tensor.layout is torch.strided:
                yield what, tensor, write
