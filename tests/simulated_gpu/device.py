"""Loads the simulated device, and lists the races that it has seen."""

from __future__ import annotations

import atexit
import ctypes
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

_seen: Counter[tuple[str, tuple[str, ...]]] = Counter()  # by text and stack


def load(library: str) -> None:
    """Load the C++ part into this process, before the first import of torch, which looks for a device once.

    Raises RuntimeError where torch is already imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the simulated GPU must be loaded before torch is imported: start a new process")
    # Its symbols are global, and those of torch's libraries with it, so that torch's Python part finds these same ones.
    loaded = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    loaded.simulated_gpu_set_reporter(_note)
    atexit.register(loaded.simulated_gpu_set_reporter, None)  # memory is freed after Python's end, too


class RaceFound(AssertionError):
    """Two uses of memory that no event, stream wait or synchronisation orders."""


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _note(text: bytes) -> None:
    """The device calls this in whatever thread it finds a race."""
    frames = [frame for frame in traceback.extract_stack() if not _is_foreign(frame.filename)]
    _seen[text.decode(), tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)] += 1


def _is_foreign(filename: str) -> bool:
    """Whether a frame is torch's, Python's, or the simulation's (its tests are not)."""
    import torch

    path = Path(filename)
    if path.parent == HERE:
        return not path.name.startswith("test_")
    return filename.startswith(("<", str(Path(torch.__file__).parent), sys.base_prefix + "/lib"))


def races() -> list[str]:
    """The races since the last ``clear``, each once, with its count and the stack at which the later use was launched.

    In autograd's threads only hooks have frames.
    """
    return ["\n    ".join((f"{text} ({count} times)", *stack)) for (text, stack), count in _seen.items()]


def clear() -> None:
    """Forget the races, and the peak of memory."""
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
