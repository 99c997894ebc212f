"""Pages that rest in host memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..errors import OffloadError
from .homes import Home
from .host_memory import HostMemory
from .lanes import Mark
from .state_store import Copied


class _HostHome:
    def __init__(self, memory: HostMemory, nbytes: int) -> None:
        self._memory, self._run = memory, memory.take(nbytes)

    def expect(self) -> None: ...

    def incoming(self) -> Tensor:
        return self._run

    def unchanged(self, mark: Mark) -> None: ...

    def outgoing(self) -> Tensor:
        return self._run

    def filled(self, mark: Mark) -> None: ...

    def release(self) -> None:
        self._memory.give_back(self._run)


class HostHomes:
    """See ``Homes``."""

    lookahead, at_once = 1, True

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self.copied = memory, Copied()

    def make(self, nbytes: int) -> Home:
        return _HostHome(self._memory, nbytes)

    def take_problems(self) -> Mapping[Home, OffloadError]:
        return {}

    def trim(self) -> None:
        self._memory.trim()

    def end_writes(self) -> None: ...

    def footprint(self) -> Mapping[str, int]:
        return {"host": self._memory.in_use, "disk": 0}

    def close(self) -> None: ...
