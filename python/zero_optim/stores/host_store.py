"""Pages that rest in host memory and are updated there: ZeRO-Offload (Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import OffloadError
from ..params.layout import round_up
from .host_memory import HostMemory
from .lanes import Lanes
from .state_store import Copied

_ALIGNMENT = 512


class HostStore:
    """See ``StateStore``.

    Attributes:
        memory, lanes: for gradients and parameters, which the update has on the host beside its pages.
    """

    lookahead = 1
    works_on = torch.device("cpu")

    def __init__(self, memory: HostMemory, lanes: Lanes) -> None:
        self.memory, self.lanes, self.copied = memory, lanes, Copied()
        self.keeps_views = True
        self._pages: dict[int, Mapping[str, Tensor]] = {}
        self._runs: dict[int, Tensor] = {}
        self._spares: dict[int, tuple[Mapping[str, Tensor], Tensor]] = {}
        self._allocated = 0

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        assert not visiting, "the update is where they are"
        self._allocated += 1
        views, self._runs[self._allocated] = self._memory_for(page)
        for name, view in views.items():
            view.copy_(page[name])
        self._pages[self._allocated] = views
        return self._allocated

    def _memory_for(self, page: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Tensor]:
        ends, end = {}, 0
        for name, tensor in page.items():
            ends[name] = end = round_up(end, _ALIGNMENT) + tensor.nbytes
        run = self.memory.take(end)
        return {name: run[ends[name] - t.nbytes : ends[name]].view(t.dtype) for name, t in page.items()}, run

    def release(self, number: int) -> None:
        del self._pages[number]
        self.memory.give_back(self._runs.pop(number))
        if number in self._spares:
            self.memory.give_back(self._spares.pop(number)[1])

    # -- spares --------------------------------------------------------------------------------------------------

    def allocate_spare(self, number: int) -> None:
        """A second page of that size, contents undefined."""
        self._spares[number] = self._memory_for(self._pages[number])
        self.keeps_views = False

    def spare(self, number: int) -> Mapping[str, Tensor]:
        return self._spares[number][0]

    def swap(self, number: int) -> None:
        """The spare is the page from now on, and the page the spare."""
        spare, run = self._spares[number]
        self._spares[number] = self._pages[number], self._runs[number]
        self._pages[number], self._runs[number] = spare, run

    # -- pages, as every store has them --------------------------------------------------------------------------

    def prefetch(self, number: int) -> None: ...

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        return self._pages[number]

    def commit(self, number: int) -> None: ...

    def discard(self, number: int) -> None: ...

    def end_step(self) -> None: ...

    def take_problems(self) -> list[OffloadError]:
        return []

    def footprint(self) -> Mapping[str, int]:
        return {"device": 0, "host": self.memory.in_use, "disk": 0}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
