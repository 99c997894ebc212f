"""Bytes that any code allocates and communicates, counted from outside."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

STATUS = Path("/proc/self/status")
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt
_RESET_PEAK = "5"
MAPPED_APART = 64 * 1024
CPU = torch.device("cpu")


def can_measure(device: torch.device = CPU) -> bool:
    """True on Linux with glibc, and for a GPU, where torch's allocations for tensors are counted."""
    return device.type == "cuda" or Path("/proc/self/clear_refs").exists() and hasattr(_libc(), "malloc_trim")


def return_what_is_freed() -> None:
    """Let glibc map every block of 64 KiB and more apart from now on, and so return it to the kernel when it is freed.

    Otherwise freed pages that glibc keeps would be counted. Mapping costs time, so time nothing after this call.
    """
    _libc().mallopt(_MMAP_THRESHOLD, MAPPED_APART)


def resident(device: torch.device = CPU) -> int:
    """Count the bytes resident now, after returning free memory; on a GPU, those allocated."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    _libc().malloc_trim(0)
    return _read("VmRSS")


def peak_of(work: Callable[[], object], device: torch.device = CPU) -> int:
    """Run ``work``. Returns the peak of resident bytes, those before it included; on a GPU, of allocated ones."""
    resident(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    work()
    return _read("VmHWM")


def _read(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    return int(found[1]) * 1024 if found else 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


# -- live tensors ------------------------------------------------------------------------------------------------------


@contextmanager
def watch(device: torch.device) -> Iterator[LiveMemory]:
    """Watch the caching allocator's count on a GPU; on a CPU, the storages of tensors made in this block."""
    gc.freeze()  # garbage is collected after each phase: looking through all imported objects takes half a second
    try:
        if device.type == "cuda":
            yield GpuMemory(device)
        else:
            with CpuMemory() as memory:
                yield memory
    finally:
        gc.unfreeze()


class GpuMemory:
    """Memory that a GPU holds for the tensors of this process, by ``torch.cuda.memory_allocated``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def after(self, work: Callable[[], object]) -> tuple[int, int]:
        """Run ``work``; bytes after it, and the most there were in it."""
        most = peak_of(work, self._device)
        return resident(self._device), most


class CpuMemory(TorchDispatchMode):
    """Memory of every storage that an op in this block has returned, while Python or autograd refers to it.

    It is measured after each op, so temporary memory inside an op is not seen. Storages may overlap, such as one made
    of a part of another: the memory that they cover together is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._peak = 0

    def after(self, work: Callable[[], object]) -> tuple[int, int]:
        """Run ``work``; bytes after it, and the most there were in it."""
        self._peak = self.covered()
        work()
        gc.collect()
        return self.covered(), self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result)
        self._peak = max(self._peak, self.covered())
        return result

    def _note(self, value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                self._note(item)
        elif isinstance(value, Tensor) and value.device.type == "cpu":
            reference = StorageWeakRef(value.untyped_storage())
            self._storages[reference.cdata] = reference

    def covered(self) -> int:
        """Count the bytes that live storages cover now."""
        ends: list[tuple[int, int]] = []
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            elif nbytes := storage.nbytes():
                ends.append(_ends(storage, nbytes))
        covered = reached = 0
        for begin, end in sorted(ends):
            covered += max(0, end - max(begin, reached))
            reached = max(reached, end)
        return covered


LiveMemory = GpuMemory | CpuMemory


def _ends(storage: torch.UntypedStorage, nbytes: int) -> tuple[int, int]:
    try:
        begin = storage.data_ptr()
    except RuntimeError:  # torch gives no address of some storages, such as those that must not be written
        return 0, 0
    return (begin, begin + nbytes) if begin else (0, 0)  # a subclass's own has no memory


# -- traffic -----------------------------------------------------------------------------------------------------------

COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of torch.distributed's collectives, and of DTensor's
NO_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")
OF_A_PART = ("scatter_",)  # our reduce-scatter under gloo is a scatter from each rank
TWICE = ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced")


class CountedTraffic(TorchDispatchMode):
    """Count the collectives issued in this block.

    Attributes:
        bytes: sum of each collective's whole tensor, N times a rank's part. On the wire a rank sends and receives
            (N-1)/N of it. An all-reduce counts twice: it is a reduce-scatter and an all-gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its own dispatch comes first, and calls the collectives
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in COLLECTIVES and name not in NO_COLLECTIVE:
            whole = _bytes_in(args[0]) if name in OF_A_PART else max(map(_bytes_in, (*args, result)))
            self.bytes += whole * (2 if name in TWICE else 1)
        return result


def _bytes_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_in, value)) if isinstance(value, list | tuple) else 0
