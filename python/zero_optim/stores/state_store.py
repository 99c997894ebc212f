"""The protocol of a state store: where state is between updates. A *page* is the state of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..comm.storage import is_there
from ..comm.streams import keep_for_current_stream
from ..errors import OffloadError


@dataclass
class Copied:
    """Bytes that a store has moved since it was made."""

    to_device: int = 0
    to_host: int = 0
    read: int = 0
    written: int = 0


class StateStore(Protocol):
    """A store of pages: it brings them to where they are updated, and back. In ``step``, one page after another::

        prefetch(0)
        prefetch(1)   fetch(0)   update   commit(0)
        prefetch(2)   fetch(1)   update   commit(1)

    Attributes:
        works_on: the device of the update.
        lookahead: how many pages are worth prefetching while one is updated.
        keeps_views: whether the tensors that ``fetch`` gave are still the state after ``commit``.
        may_lose: whether a page can be lost, as on a disk that fails.
        copied: bytes moved so far.
    """

    works_on: torch.device
    lookahead: int
    keeps_views: bool
    may_lose: bool
    copied: Copied

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        """Keep a new page, these tensors by name. Returns its number.

        Args:
            visiting: tensors that rest in host memory, and are copied in and out with the page.
        """

    def release(self, number: int) -> None:
        """Forget a page."""

    def prefetch(self, number: int) -> None:
        """Prepare for ``fetch`` of this page, which will follow soon."""

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        """Give the page's tensors on ``works_on``, to be read and written until ``commit``.

        The current stream waits for them. Two pages may be fetched at a time. Raises OffloadError for a lost page.
        """

    def commit(self, number: int) -> None:
        """End ``fetch``: what the tensors hold is the state now."""

    def discard(self, number: int) -> None:
        """End ``fetch`` of a page that was only read: nothing is copied back."""

    def wait_for_visitors(self, number: int) -> None:
        """Block the host until no copy uses the page's visiting tensors: the host may read and write them then."""

    def end_step(self) -> None:
        """Note that all pages of a step were committed."""

    def use_room(self) -> None:
        """Let pages that fit on the device now stay there, and give back memory that nothing uses.

        Call it after the last of several releases.
        """

    def take_problems(self) -> Mapping[int, OffloadError]:
        """Give, by page, the error of a write that failed since the last call. The page is in host memory, not lost."""

    def residents(self) -> list[Tensor]:
        """Give the tensors that stay on the device between updates."""

    def drop_frames(self) -> None:
        """Free the device's memory that holds nothing between updates."""

    def make_frames(self) -> None:
        """Allocate again what ``drop_frames`` has freed."""

    def footprint(self) -> Mapping[str, int]:
        """Bytes taken, by memory: device, host, disk."""

    def close(self) -> None:
        """Give everything back. The pages are gone."""


class PagesStay:
    """The methods that all stores share whose pages never move."""

    may_lose = False

    def __init__(self) -> None:
        self.copied = Copied()
        self._pages: dict[int, Mapping[str, Tensor]] = {}
        self._allocated = 0

    def _keep(self, page: Mapping[str, Tensor]) -> int:
        self._allocated += 1
        self._pages[self._allocated] = page
        return self._allocated

    def prefetch(self, number: int) -> None: ...

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        return self._pages[number]

    def commit(self, number: int) -> None: ...

    def discard(self, number: int) -> None: ...

    def wait_for_visitors(self, number: int) -> None: ...

    def end_step(self) -> None: ...

    def use_room(self) -> None: ...

    def take_problems(self) -> Mapping[int, OffloadError]:
        return {}

    def drop_frames(self) -> None: ...

    def make_frames(self) -> None: ...


class DeviceStore(PagesStay):
    """Pages stay on the device: nothing moves, and what ``fetch`` gives is the state itself."""

    lookahead, keeps_views = 0, True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.works_on = device

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        assert not visiting, "what visits comes and goes: that takes a PagedStore"
        return self._keep(page)

    def release(self, number: int) -> None:
        keep_for_current_stream(*self._pages.pop(number).values())

    def residents(self) -> list[Tensor]:
        return [tensor for page in self._pages.values() for tensor in page.values()]

    def footprint(self) -> Mapping[str, int]:
        return {"device": sum(t.nbytes for t in self.residents() if is_there(t)), "host": 0, "disk": 0}

    def close(self) -> None: ...
