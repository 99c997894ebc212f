"""``zero-optim`` with ranks that die: as told by a plan, a line for each death, in the environment's ``VICTIM_PLAN``.

A line says ``rank phase count delay``: in one attempt of the launcher, that rank kills itself ``delay`` seconds after
it has begun the ``count``-th ``backward``, ``step`` or ``save`` of the attempt. The attempt's number is the line's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zero_optim
from zero_optim.checkpoint import saving
from zero_optim.cli import main


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(call: Callable[..., Any], count: int, delay: float) -> Callable[..., Any]:
    left = [count]

    def wrapped(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            threading.Timer(delay, _die).start()
        return call(*arguments, **more)

    return wrapped


def _arm() -> None:
    lines = Path(os.environ["VICTIM_PLAN"]).read_text().splitlines()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt >= len(lines):
        return
    rank, phase, count, delay = lines[attempt].split()
    if rank != os.environ["RANK"]:
        return
    places: dict[str, tuple[Any, str]] = {
        "backward": (torch.Tensor, "backward"),
        "step": (zero_optim.ShardedAdamW, "step"),
        "save": (saving, "_save"),
    }
    owner, name = places[phase]
    setattr(owner, name, _dying(getattr(owner, name), int(count), float(delay)))


if __name__ == "__main__":
    _arm()
    sys.exit(main(sys.argv[1:]))
