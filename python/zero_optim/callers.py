"""Finds who calls, in the interpreter's frames, where torch gives no other sign.

``torch.amp.GradScaler`` and ``torch.distributed.checkpoint`` ask an optimizer what every client asks, by the same
attributes and methods, and need another answer. They pass nothing along that tells them from the others. Nowhere else
in the package is a frame looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def called_from(module: str) -> bool:
    """True if the function that asks this was called by code of ``module``."""
    return sys._getframe(2).f_globals.get("__name__") == module


def called_within(module: str) -> bool:
    """True if code of ``module`` is among all that is being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def local_of_caller(name: str) -> Any:
    """The local variable ``name`` of what called the function that asks this; None: it has none."""
    return sys._getframe(2).f_locals.get(name)


def locals_of_callers(name: str) -> Iterator[Any]:
    """The local variables ``name`` of all that is being called, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name in frame.f_locals:
            yield frame.f_locals[name]
        frame = frame.f_back
