"""The home of state while no update uses it. A *page* is the state of one shard."""

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
    """Brings pages to where they are updated, and back. In ``step``, one page after another::

        prefetch(0)
        prefetch(1)   fetch(0)   update   commit(0)
        prefetch(2)   fetch(1)   update   commit(1)

    Attributes:
        works_on: the device of the update.
        lookahead: how many pages are worth prefetching while one is updated.
        keeps_views: whether what ``fetch`` gave stays the state after ``commit``.
        may_lose: whether a page can be lost.
        copied: what has moved.
    """

    works_on: torch.device
    lookahead: int
    keeps_views: bool
    may_lose: bool
    copied: Copied

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        """Keep a new page, these tensors by name. Returns its number.

        Args:
            visiting: tensors that live elsewhere, in host memory, and come and go with the page.
        """

    def release(self, number: int) -> None:
        """Forget a page."""

    def prefetch(self, number: int) -> None:
        """Prepare for ``fetch`` of this page, which will follow soon."""

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        """Give the page where it is updated, ordered before what follows; to be read and written until ``commit``.

        Two may be fetched at a time. Raises OffloadError where the page is lost.
        """

    def commit(self, number: int) -> None:
        """End ``fetch``: what the tensors hold is the state now."""

    def discard(self, number: int) -> None:
        """End ``fetch``, after which the tensors were only read."""

    def wait_for_visitors(self, number: int) -> None:
        """Let the host wait until what visits with the page has come and gone: it may read and write it then."""

    def end_step(self) -> None:
        """Be told that all pages of a step were committed."""

    def use_room(self) -> None:
        """Let pages stay on the device that fit there now, and give back memory that nothing uses.

        To be called when pages were released, and no more will be.
        """

    def take_problems(self) -> Mapping[int, OffloadError]:
        """Say, by page, why it could not be written since this was last asked. It is in host memory, not lost."""

    def residents(self) -> list[Tensor]:
        """Give the tensors that stay on the device between updates."""

    def drop_frames(self) -> None:
        """Give back the device's memory that holds nothing between updates."""

    def make_frames(self) -> None:
        """Take again what ``drop_frames`` gave back."""

    def footprint(self) -> Mapping[str, int]:
        """Bytes taken, by memory: device, host, disk."""

    def close(self) -> None:
        """Give everything back. The pages are gone."""


class PagesStay:
    """The part of a store that is the same in all whose pages stay where they are."""

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
