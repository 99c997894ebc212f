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

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        assert not visiting, "the update is where they are"
        return self._keep(
            {name: self.memory.take(tensor.nbytes).view(tensor.dtype).copy_(tensor) for name, tensor in page.items()}
        )

    def release(self, number: int) -> None:
        for tensor in self._pages.pop(number).values():
            self.memory.give_back(tensor.view(torch.uint8))

    def use_room(self) -> None:
        self.memory.trim()

    def residents(self) -> list[Tensor]:
        return []

    def footprint(self) -> Mapping[str, int]:
        return {"device": 0, "host": self.memory.in_use, "disk": 0}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
