"""Finds who calls, in the interpreter's frames, where torch gives no other sign.

``torch.amp.GradScaler`` and ``torch.distributed.checkpoint`` read the same attributes of an optimizer as other clients,
and need another answer; so does ``torch.compile``, of a gradient. They pass nothing along that tells them apart. No
other part of the package looks at frames.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

DCP_STATE_DICT = "torch.distributed.checkpoint.state_dict"
DCP_SAVER = "torch.distributed.checkpoint.state_dict_saver"


def called_from(module: str) -> bool:
    """True if the function that asks this was called by code of ``module``."""
    return sys._getframe(2).f_globals.get("__name__") == module


def called_within(module: str, function: str | None = None) -> bool:
    """True if code of ``module`` is anywhere on the stack, or that of its ``function``."""
    return any(function in (None, frame.f_code.co_name) for frame in _frames_of(module))


def local_of_caller(name: str) -> Any:
    """Read the local variable ``name`` of the caller of the function that asks this; None: it has none."""
    return sys._getframe(2).f_locals.get(name)


def locals_of_callers(name: str, module: str) -> Iterator[Any]:
    """Yield the local variables ``name`` of all frames of ``module``'s code on the stack, the innermost first."""
    for frame in _frames_of(module):
        # Of other frames ``f_locals`` is not asked for: the copy that it makes keeps what the frame deletes later.
        if name in frame.f_locals:
            yield frame.f_locals[name]


def _frames_of(module: str) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back
