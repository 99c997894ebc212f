"""Where the state of shards lives while no update uses it. A *page* is the state of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..comm.streams import keep_for_current_stream


class StateStore(Protocol):
    """Brings pages to the device of the update, and back. In ``step``, one page after another::

    prefetch(0)
    prefetch(1)   fetch(0)   update   commit(0)
    prefetch(2)   fetch(1)   update   commit(1)
    """

    def allocate(self, page: Mapping[str, Tensor]) -> int:
        """Keep a new page, these tensors by name. Returns its number."""

    def release(self, number: int) -> None:
        """Forget a page."""

    def prefetch(self, number: int) -> None:
        """``fetch`` of this page will follow soon."""

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        """The page on the device, ordered before what follows; to be read and written until ``commit``.

        ``state_dict`` gives views of it away, which are good for as long as the store keeps the page on the device.
        """

    def commit(self, number: int) -> None:
        """What the fetched tensors hold is the state now."""


class DeviceStore:
    """Pages stay on the device: nothing moves, and what ``fetch`` gives is the state itself."""

    def __init__(self) -> None:
        self._pages: dict[int, Mapping[str, Tensor]] = {}
        self._allocated = 0

    def allocate(self, page: Mapping[str, Tensor]) -> int:
        self._allocated += 1
        self._pages[self._allocated] = page
        return self._allocated

    def release(self, number: int) -> None:
        keep_for_current_stream(*self._pages.pop(number).values())

    def prefetch(self, number: int) -> None:
        pass

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        return self._pages[number]

    def commit(self, number: int) -> None:
        pass
