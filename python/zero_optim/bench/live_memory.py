"""Bytes that live tensors occupy on one device, now and at their peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .peak_memory import peak_of, resident


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
