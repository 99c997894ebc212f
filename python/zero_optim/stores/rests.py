"""Host memory that keeps what an optimizer has on the device, while it sleeps. It is kept for the next sleep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..params.layout import round_up
from .host_memory import ALIGNMENT, HostMemory
from .lanes import Lane, make_lanes


class Rest:
    """One run of host memory, pinned where a GPU copies, in which tensors lie one after another.

    Args:
        device: of what is saved.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = HostMemory(pinned=device.type == "cuda", device=device)
        self._lanes = make_lanes(device)
        self._run = self._memory.take(0)

    def save(self, flats: Sequence[Tensor]) -> None:
        """Copy all ``flats``, in place of what was saved before. Raises OffloadError; ``flats`` are not changed."""
        needed = sum(round_up(flat.nbytes, ALIGNMENT) for flat in flats)
        if self._run.nbytes < needed:
            self.close()  # before more is taken: host memory need not hold both
            self._run = self._memory.take(needed)
        self._copy(self._lanes.to_host, self._places(flats), flats)

    def load(self, flats: Sequence[Tensor]) -> None:
        """Copy the first ``len(flats)`` saved tensors into ``flats``, of the sizes saved."""
        self._copy(self._lanes.to_device, flats, self._places(flats))

    def _copy(self, lane: Lane, targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
        """Copy, after earlier work of the device, which may use the memory. The host waits until it is over."""
        now, over = self._lanes.mark(), self._lanes.mark()
        now.set()
        lane.after(now)
        for target, source in zip(targets, sources, strict=True):
            lane.copy(target, source)
        lane.set(over)
        over.wait()

    def _places(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        start = 0
        for flat in flats:
            yield self._run[start : start + flat.nbytes]
            start += round_up(flat.nbytes, ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory taken."""
        return self._memory.in_use

    def close(self) -> None:
        """Give everything back."""
        run, self._run = self._run, self._memory.take(0)
        self._memory.give_back(run)
        del run
        self._memory.trim()
