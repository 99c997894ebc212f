"""Watchers of a piece of code: the ops it dispatches, its collectives, its host reads, the storages it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HOST_READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "__complex__")

# The c10d operators behind torch.distributed's functions, whatever the functions are called, and which of their
# arguments is the tensor of full bucket size.
_FULL_SIZE_ARGUMENT = {
    "allreduce_": 0,
    "_reduce_scatter_base_": 1,
    "_allgather_base_": 0,
    "broadcast_": 0,
    "scatter_": 0,  # of a part
}


class HostRead(AssertionError):
    """Code that must not wait for the device read one of its values."""


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Inside, every way in which Python reads a tensor's value raises HostRead."""

    def refuse(name: str):
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise HostRead(f"Tensor.{name} was called")

        return method

    own = {name: vars(Tensor)[name] for name in HOST_READS if name in vars(Tensor)}
    try:
        for name in HOST_READS:
            setattr(Tensor, name, refuse(name))
        yield
    finally:
        for name in HOST_READS:
            if name in own:
                setattr(Tensor, name, own[name])
            else:
                delattr(Tensor, name)


class OpLog(TorchDispatchMode):
    """Names of the ops dispatched inside, as ``aten::add_``, and what storage they returned beyond their arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.allocations: list[tuple[str, int, int]] = []  # op, address, bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        given = {address for address, _ in _storages_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for address, size in _storages_in(result):
            if address not in given and size:
                self.allocations.append((func._schema.name, address, size))
        return result


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as the process group saw it; ``bytes`` of the tensor of full size."""

    name: str
    dtype: torch.dtype
    bytes: int


class CollectiveLog(TorchDispatchMode):
    """Every collective issued inside, in order. The scatters of a gloo reduce-scatter, one from each rank, are one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            tensor = args[_FULL_SIZE_ARGUMENT.get(name, 0)]
            while isinstance(tensor, (list, tuple)):
                tensor = tensor[0]
            self.calls.append(Collective(name, tensor.dtype, tensor.numel() * tensor.element_size()))
            if name == "scatter_" and args[3] > 0:  # the rank that it is from
                *self.calls, one, another = self.calls
                assert one.name == name, "they come one after another"
                self.calls.append(dataclasses.replace(one, bytes=one.bytes + another.bytes))
        return func(*args, **(kwargs or {}))


def _storages_in(value: Any) -> Iterator[tuple[int, int]]:
    if isinstance(value, Tensor):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages_in(item)
    elif isinstance(value, dict):
        yield from _storages_in(list(value.values()))


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        yield from value
    elif type(value).__module__.split(".")[0] == "zero_optim":
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield getattr(value, name)


def storages_of(root: Any) -> dict[int, int]:
    """Address to bytes of every non-empty storage reachable from ``root`` by containers and zero_optim's objects."""
    seen: set[int] = set()
    found: dict[int, int] = {}
    stack = [root]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.update((address, size) for address, size in _storages_in(value) if size)
            if type(value).__module__.split(".")[0] != "zero_optim":
                continue
        stack.extend(_children(value))
    return found


def open_files_in(folder: object) -> list[str]:
    """Those that this process has open there, also such as have no name any more."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(f"{folder}/")]
