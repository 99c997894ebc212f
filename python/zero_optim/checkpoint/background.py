"""Saving while training goes on: a copy of what a rank writes, in host memory, and a thread that writes it.

::

    program   save: copy to a buffer | train ... train | save: waits for the thread, then copies again
    thread                           | write, agree with the other ranks' threads, publish
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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

_WHERE = "checkpoint.wait"


class SaveBuffer:
    """Host memory for the values of one save, kept for the next. Where values come from a GPU it is pinned, by
    ``HostMemory``: torch's own pinned memory would come in powers of two."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned = False

    def hold(self, sizes: Sequence[int], values: Iterable[Tensor]) -> CopiedValues:
        """Copy ``values``, of ``sizes`` bytes. Copies from a GPU may still be under way when this returns."""
        copied: list[Tensor] = []
        place = 0
        gpus: set[torch.device] = set()
        for size, flat in zip(sizes, values, strict=True):
            if flat.device.type == "cuda":
                gpus.add(flat.device)
            if not copied:
                self._allocate(sum(sizes), next(iter(gpus), None))
            copied.append(self._memory.narrow(0, place, size))
            copied[-1].copy_(flat.detach().view(torch.uint8), non_blocking=True)
            place += size
        return CopiedValues(copied, [_reached(gpu) for gpu in gpus])

    def _allocate(self, nbytes: int, gpu: torch.device | None) -> None:
        # The host would wait for a GPU's copy to memory that is not pinned.
        if self._memory.numel() < nbytes or (gpu is not None and not self._pinned):
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old goes before the new comes
            self._pinned = gpu is not None
            if gpu is not None:
                self._memory = HostMemory(pinned=True, device=gpu).take(nbytes)
            else:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class CopiedValues:
    """Values in the buffer, as bytes, once every event of ``arrived`` has passed."""

    values: Sequence[Tensor]
    arrived: Sequence[torch.cuda.Event]

    def __iter__(self) -> Iterator[Tensor]:
        for event in self.arrived:
            with on_device(event.device):
                event.synchronize()
        return iter(self.values)


def _reached(gpu: torch.device) -> torch.cuda.Event:
    """Record an event that passes when all copies launched so far are over."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(gpu))
    return event


SAVE_BUFFER = SaveBuffer()


class Saving:
    """A save in the background. ``comm``: the program's, over which ranks learn how the save went."""

    def __init__(self, comm: Comm, work: Callable[[], Path]) -> None:
        self.comm = comm
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zero_optim checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        """Wait for the thread. Raises CheckpointError where it has failed."""
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(f"the save in the background has failed: {self._error}") from self._error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def report(self) -> None:
        """Print what went wrong, at the end of a program that has not called ``wait``."""
        self._thread.join()
        if self._error is not None:
            print(f"zero_optim: a save in the background has failed, and nobody asked: {self._error}", file=sys.stderr)


_saving: Saving | None = None


def start(comm: Comm, work: Callable[[], Path]) -> None:
    """Do ``work`` in a thread. Call ``wait`` before, and before the buffer is filled."""
    global _saving
    _saving = Saving(comm, work)


def wait() -> None:
    """Collective. Wait until what ``save(..., background=True)`` began is published.

    Raises CheckpointError, on every rank, where it has failed; then earlier checkpoints are as they were. No effect
    where nothing is under way.
    """
    global _saving
    if _saving is None:
        return
    saving = _saving
    try:
        together(saving.comm, saving.result, _WHERE)
    except Exception:
        forget_group(saving.comm)  # a collective may have failed in the thread's group
        raise
    finally:
        if saving.over:  # not where Ctrl-C has ended the wait: the thread still reads the buffer
            _saving = None


@atexit.register
def _report() -> None:
    if _saving is not None:
        _saving.report()
