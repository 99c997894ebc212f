"""Explain an allocation that failed: what the optimizer needs, and what needs less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..engine import Engine
from ..errors import OutOfMemoryError, ZeroOptimError
from ..figures import size
from .live import device_memory, plan_of_engine
from .report import of_one, remedy

_OF_THE_CPU = ("can't allocate memory", "not enough memory")
"""Words of torch's allocator of the CPU, in a RuntimeError: on Linux, and on other systems."""


@contextmanager
def explaining_out_of_memory(engine: Engine, doing: str) -> Iterator[None]:
    """Until the first step is over, raise ``OutOfMemoryError`` with the plan, from what the allocator raised.

    Later the optimizer takes no new memory, and whatever is raised passes. ``doing``: for people, as in "in step".
    """
    try:
        yield
    except RuntimeError as error:
        if engine.steps or not ran_out(error):
            raise
        raise OutOfMemoryError(_message(engine, doing, error)) from error


def ran_out(error: RuntimeError) -> bool:
    """True if an allocator has raised it, for want of memory."""
    if isinstance(error, ZeroOptimError):
        return False  # it is explained already: perhaps another rank ran out
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OF_THE_CPU)


def _message(engine: Engine, doing: str, error: RuntimeError) -> str:
    device = engine.sharding.device
    there = device_memory(device)
    made = plan_of_engine(engine)
    lines = [f"out of memory on {device}, {doing}: {str(error).splitlines()[0]}", "", of_one(made), ""]
    if device.type == "cuda" and made.most <= there:
        lines.append(
            f"The plan takes {size(made.most)} of {size(there)}. Activations, other tensors or other processes "
            f"have the rest: torch has {size(torch.cuda.memory_allocated(device))} in use. A smaller batch, or:"
        )
    lines.append(remedy(made, there))
    return "\n".join(lines)
