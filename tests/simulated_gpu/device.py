"""Loads the simulated device, and lists the races that it has seen."""

from __future__ import annotations

import atexit
import ctypes
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from .build import library, torch_directory

HERE = Path(__file__).resolve().parent
TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so")

_loaded: ctypes.CDLL | None = None
_seen: Counter[tuple[str, tuple[str, ...]]] = Counter()  # by text and stack


def load() -> None:
    """Load the C++ part into this process, before the first import of torch, which looks for a device once.

    Raises Unavailable where it cannot be built, RuntimeError where it does not compile, or torch is already imported.
    """
    global _loaded
    if _loaded is not None:
        return
    if "torch" in sys.modules:
        raise RuntimeError("the simulated GPU must be loaded before torch is imported: start a new process")
    path = library()
    for name in TORCH_LIBRARIES:  # with global symbols, so that torch's Python part finds these same libraries
        ctypes.CDLL(str(torch_directory() / "lib" / name), ctypes.RTLD_GLOBAL)
    _loaded = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    _loaded.simulated_gpu_set_reporter(_note)
    atexit.register(_loaded.simulated_gpu_set_reporter, None)  # memory is freed after Python's end, too


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _note(text: bytes) -> None:
    """The device calls this in whatever thread it finds a race."""
    frames = [frame for frame in traceback.extract_stack() if not _is_foreign(frame.filename)]
    _seen[text.decode(), tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)] += 1


def _is_foreign(filename: str) -> bool:
    """Whether a frame is torch's, Python's, or the simulation's (its tests are not)."""
    path = Path(filename)
    if path.parent == HERE:
        return not path.name.startswith("test_")
    return filename.startswith(("<", str(torch_directory()), sys.base_prefix + "/lib"))


def install() -> None:
    """Make ``torch.cuda`` and ``torch.UntypedStorage.resize_`` use the device, for as long as the process lives."""
    from . import torch_cuda

    torch_cuda.install()


def races() -> list[str]:
    """The races since the last ``clear``, each once, with its count and the stack at which the later use was launched.

    In autograd's threads only hooks have frames.
    """
    return ["\n    ".join((f"{text} ({count} times)", *stack)) for (text, stack), count in _seen.items()]


def clear() -> None:
    """Forget the races. The host waits for all streams, and new streams are numbered from the first again."""
    call("restart")
    call("reset_peak")
    _seen.clear()


def host_access(tensor: Any, write: bool, what: str = "host_access") -> None:
    """Record that the host reads or writes a CPU tensor. If pinned, the host must have waited for the device."""
    call("host_access", tensor.detach(), write, what)


def call(name: str, *args: Any) -> Any:
    """Call a function of the C++ part. A TorchDispatchMode of the program does not see it."""
    import torch

    with torch._C._DisableTorchDispatch():
        return getattr(torch.ops.simulated_gpu, name)(*args)
