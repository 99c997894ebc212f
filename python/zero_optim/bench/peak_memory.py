"""Peak memory of a piece of work in this process: resident pages, as Linux counts them, or a GPU's."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

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
