"""Pages that rest in host memory and are updated there: ZeRO-Offload (Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import OffloadError
from .host_memory import HostMemory
from .lanes import Lanes
from .state_store import Copied


class HostStore:
    """See ``StateStore``.

    Attributes:
        memory, lanes: for gradients and parameters, which the update has on the host beside its pages.
    """

    lookahead, may_lose = 1, False
    keeps_views = False  # memory that was given back holds another page soon
    works_on = torch.device("cpu")

    def __init__(self, memory: HostMemory, lanes: Lanes) -> None:
        self.memory, self.lanes, self.copied = memory, lanes, Copied()
        self._pages: dict[int, Mapping[str, Tensor]] = {}
        self._spares: dict[int, Mapping[str, Tensor]] = {}
        self._allocated = 0

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        assert not visiting, "the update is where they are"
        self._allocated += 1
        self._pages[self._allocated] = self._like(page)
        for name, tensor in self._pages[self._allocated].items():
            tensor.copy_(page[name])
        return self._allocated

    def _like(self, page: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: self.memory.take(tensor.nbytes).view(tensor.dtype) for name, tensor in page.items()}

    def release(self, number: int) -> None:
        for page in (self._pages.pop(number), self._spares.pop(number, {})):
            for tensor in page.values():
                self.memory.give_back(tensor.view(torch.uint8))

    # -- spares --------------------------------------------------------------------------------------------------

    def allocate_spare(self, number: int) -> None:
        """A second page of that size, contents undefined."""
        self._spares[number] = self._like(self._pages[number])

    def spare(self, number: int) -> Mapping[str, Tensor]:
        return self._spares[number]

    def swap(self, number: int) -> None:
        """The spare is the page from now on, and the page the spare."""
        self._pages[number], self._spares[number] = self._spares[number], self._pages[number]

    # -- pages, as every store has them --------------------------------------------------------------------------

    def prefetch(self, number: int) -> None: ...

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        return self._pages[number]

    def commit(self, number: int) -> None: ...

    def discard(self, number: int) -> None: ...

    def settle(self, number: int) -> None: ...

    def end_step(self) -> None: ...

    def take_in(self) -> None: ...

    def take_problems(self) -> list[OffloadError]:
        return []

    def footprint(self) -> Mapping[str, int]:
        return {"device": 0, "host": self.memory.in_use, "disk": 0}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
