"""Pages that rest in host memory and are updated there: ZeRO-Offload (Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .host_memory import HostMemory
from .lanes import Lanes
from .state_store import PagesStay


class HostStore(PagesStay):
    """See ``StateStore``.

    Attributes:
        memory, lanes: for the gradients and parameters that an update needs on the host beside its page.
        threads: so many an update uses.
    """

    lookahead = 1
    keeps_views = False  # memory that was given back holds another page soon
    works_on = torch.device("cpu")

    def __init__(self, memory: HostMemory, lanes: Lanes, threads: int) -> None:
        super().__init__()
        self.memory, self.lanes, self.threads = memory, lanes, threads
        self._spares: dict[int, Mapping[str, Tensor]] = {}

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        assert not visiting, "the update is where they are"
        kept = self._like(page)
        for name, tensor in kept.items():
            tensor.copy_(page[name])
        return self._keep(kept)

    def _like(self, page: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: self.memory.take(tensor.nbytes).view(tensor.dtype) for name, tensor in page.items()}

    def release(self, number: int) -> None:
        for page in (self._pages.pop(number), self._spares.pop(number, {})):
            for tensor in page.values():
                self.memory.give_back(tensor.view(torch.uint8))

    # -- spares --------------------------------------------------------------------------------------------------

    def allocate_spare(self, number: int) -> None:
        """Allocate a second page of the same size, contents undefined."""
        self._spares[number] = self._like(self._pages[number])

    def spare(self, number: int) -> Mapping[str, Tensor]:
        return self._spares[number]

    def swap(self, number: int) -> None:
        """Exchange the page and its spare."""
        self._pages[number], self._spares[number] = self._spares[number], self._pages[number]

    # -- memory --------------------------------------------------------------------------------------------------

    def use_room(self) -> None:
        self.memory.trim()

    def residents(self) -> list[Tensor]:
        return []

    def footprint(self) -> Mapping[str, int]:
        return {"device": 0, "host": self.memory.in_use, "disk": 0}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
