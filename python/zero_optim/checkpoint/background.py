"""Background saves: copy this rank's values to host memory, and write them in a thread while training goes on.

::

    program   save: copy to a buffer | train ... train | save: waits for the thread, then copies again
    thread                           | write, agree with the other ranks' threads, publish
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.groups import forget_group
from ..comm.streams import on_device
from ..comm.together import together
from ..errors import CheckpointError
from ..stores.host_memory import HostMemory


class SaveBuffer:
    """Host memory for the values of one save, reused by the next. It is pinned where values come from a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned = False

    def hold(self, sizes: Sequence[int], values: Iterable[Tensor]) -> Iterator[Tensor]:
        """Copy ``values``, of ``sizes`` bytes. Returns the copies, as bytes; to read the first waits for the GPU."""
        copied: list[Tensor] = []
        place = 0
        gpus: set[torch.device] = set()
        for size, flat in zip(sizes, values, strict=True):
            gpu = flat.device if flat.device.type == "cuda" else None
            # The host would wait for a GPU's copy to memory that is not pinned.
            if not copied and (self._memory.numel() < sum(sizes) or (gpu is not None and not self._pinned)):
                self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old goes before the new comes
                self._pinned = gpu is not None
                self._memory = HostMemory(pinned=self._pinned, device=gpu).take(sum(sizes))
            gpus |= set() if gpu is None else {gpu}
            copied.append(self._memory.narrow(0, place, size))
            copied[-1].copy_(flat.detach().view(torch.uint8), non_blocking=True)
            place += size
        # Events order the writing thread after these copies, on the stream that made them.
        return _once_arrived(copied, [torch.cuda.current_stream(gpu).record_event() for gpu in gpus])


def _once_arrived(copied: Sequence[Tensor], arrived: Sequence[torch.cuda.Event]) -> Iterator[Tensor]:
    # The writing thread waits here: copies from a GPU are in flight when the save returns to the program.
    for event in arrived:
        with on_device(event.device):
            event.synchronize()
    yield from copied


SAVE_BUFFER = SaveBuffer()  # one for the process, so that its memory is pinned once


@dataclass(frozen=True)
class _Running:
    """A save in the background. ``comm``: the program's, over which ranks learn how the save went."""

    comm: Comm
    saved: Future[Path]

    def check(self) -> None:
        """Wait for the thread. Raises CheckpointError where it has failed."""
        if (error := self.saved.exception()) is not None:
            raise CheckpointError(f"the save in the background has failed: {error}") from error


_running: _Running | None = None


def start(comm: Comm, work: Callable[[], Path]) -> None:
    """Do ``work`` in a thread. Call ``wait`` before, and before the buffer is filled."""
    global _running
    executor = ThreadPoolExecutor(1, "zero_optim checkpoint")
    _running = _Running(comm, executor.submit(work))
    executor.shutdown(wait=False)  # the thread ends with this save


def wait() -> None:
    """Collective. Wait until what ``save(..., background=True)`` began is published.

    Raises CheckpointError, on every rank, where it has failed; then earlier checkpoints are as they were. No effect
    where no save is in flight.
    """
    global _running
    if _running is None:
        return
    running = _running
    try:
        together(running.comm, running.check, "checkpoint.wait")  # all threads are done when the first rank goes on
    except Exception:
        forget_group(running.comm)  # a collective may have failed in the thread's group
        raise
    finally:
        if running.saved.done():  # not where Ctrl-C has ended the wait: the thread still reads the buffer
            _running = None


@atexit.register
def _report() -> None:
    """Print what went wrong, at the end of a program that has not called ``wait``."""
    if _running is not None and (error := _running.saved.exception()) is not None:
        print(f"zero_optim: a save in the background has failed, and nobody asked: {error}", file=sys.stderr)
