"""Loads the device, puts it into ``torch.cuda``, and tells what it has seen."""

from __future__ import annotations

import atexit
import ctypes
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import library, torch_directory

HERE = Path(__file__).resolve().parent
TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so")

_loaded: ctypes.CDLL | None = None
_seen: Counter[tuple[str, tuple[str, ...]]] = Counter()


@dataclass(frozen=True)
class Race:
    """Two uses of memory that nothing orders, or memory freed too early.

    ``text``: which op on which stream, and which op on which other stream. ``stack``: where the later of the two was
    issued, the innermost frame last; frames of torch's are left out, and in autograd's threads only hooks have frames.
    ``count``: how often it was seen.
    """

    text: str
    stack: tuple[str, ...]
    count: int

    def __str__(self) -> str:
        return "\n    ".join((f"{self.text} ({self.count} times)", *self.stack))


@dataclass(frozen=True)
class Counts:
    """What the device has done.

    Attributes:
        launches: pieces of work.
        accesses: uses of memory that were checked.
        blocks: allocations alive, pinned ones included.
        bytes: of tensors on the device, without rounding.
        peak_bytes: the most of them at once.
    """

    launches: int
    accesses: int
    blocks: int
    bytes: int
    peak_bytes: int


def load() -> None:
    """Load the C++ part into this process. Comes before the first import of torch, which looks for a device once.

    Raises Unavailable where it cannot be built, RuntimeError where it does not compile, or torch is imported already.
    """
    global _loaded
    if _loaded is not None:
        return
    if "torch" in sys.modules:
        raise RuntimeError(
            "simulated_gpu.load() comes before torch is imported: torch has found that there is no device, and does "
            "not look again. Use a fresh process, and import there what imports torch after load()"
        )
    path = library()
    for name in TORCH_LIBRARIES:  # with their symbols for all, so that torch's Python part finds these same ones
        ctypes.CDLL(str(torch_directory() / "lib" / name), ctypes.RTLD_GLOBAL)
    _loaded = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    _loaded.simulated_gpu_set_reporter(_note)
    atexit.register(_loaded.simulated_gpu_set_reporter, None)  # memory is freed after Python's end, too


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _note(text: bytes) -> None:
    """Called by the device, in whatever thread a race is found."""
    frames = [frame for frame in traceback.extract_stack() if not _is_foreign(frame.filename)]
    _seen[text.decode(), tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)] += 1


def _is_foreign(filename: str) -> bool:
    """Of torch, of Python itself, or of this device (its tests are not)."""
    path = Path(filename)
    if path.parent == HERE:
        return not path.name.startswith("test_")
    return filename.startswith(("<", str(torch_directory()), sys.base_prefix + "/lib"))


def install() -> None:
    """Make ``torch.cuda`` and ``torch.UntypedStorage.resize_`` use the device, for as long as the process lives."""
    if _loaded is None:
        raise RuntimeError("simulated_gpu.load() comes first, before torch is imported")
    from . import torch_cuda

    torch_cuda.install()


def races() -> list[Race]:
    """The races since the last ``clear``, each once, in the order in which they were first seen."""
    return [Race(text, stack, count) for (text, stack), count in _seen.items()]


def clear() -> None:
    """Forget the races. The host waits for all streams. New streams are numbered from the first again, those of
    ``ops.new_stream`` too: do not use older ones afterwards.
    """
    call("restart")
    call("reset_peak")
    _seen.clear()


def counts() -> Counts:
    """Since the process began. The peak is that since ``clear`` or ``torch.cuda.reset_peak_memory_stats``."""
    return Counts(*call("counts"))


def set_arrival(when: str, seed: int = 0) -> None:
    """What queries say of work that the host has not waited for.

    ``"never"``: that it is not over. ``"always"``: that it is. ``"random"``: either, by a coin from ``seed``; give each
    rank its own. Once a query has said that work is over, the host knows so, as if it had waited.
    """
    call("set_arrival", when, seed)


def host_access(tensor: Any, write: bool, what: str = "host_access") -> None:
    """The host reads or writes a CPU tensor. Checked where it is pinned: the host has to have waited for the device.

    ``what`` names the access in a report.
    """
    call("host_access", tensor.detach(), write, what)


def call(name: str, *args: Any) -> Any:
    """A function of the C++ part. It is no op of the program's: a TorchDispatchMode does not see it."""
    import torch

    with torch._C._DisableTorchDispatch():
        return getattr(torch.ops.simulated_gpu, name)(*args)
