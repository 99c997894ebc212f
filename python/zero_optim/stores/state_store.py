"""State stores: where state is between updates. A *page* is the state of one shard.

Pages of a ``DeviceStore`` or a ``HostStore`` stay where they are updated; those of a ``PagedStore`` move. See
``paged_store.make_store``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.streams import is_there, keep_for_current_stream
from ..params.layout import round_up
from .host_memory import HostMemory, Lanes
from .offload import FRAME_ALIGNMENT, Copied


class StateStore:
    """A store of pages: it brings them to where they are updated, and back. In ``step``, one page after another::

        prefetch(0)
        prefetch(1)   fetch(0)   update   commit(0)
        prefetch(2)   fetch(1)   update   commit(1)

    Where pages stay, which is what this class does, most of these calls do nothing.

    Attributes:
        works_on: the device of the update.
        lookahead: how many pages are worth prefetching while one is updated.
        keeps_views: whether the tensors that ``fetch`` gave are still the state after ``commit``. Else their memory
            may hold another page soon.
        may_lose: whether a page can be lost, as on a disk that fails.
        copied: bytes moved so far.
    """

    works_on: torch.device
    lookahead: int
    keeps_views = False
    may_lose = False

    def __init__(self) -> None:
        self.copied = Copied()
        self._pages: dict[int, Any] = {}
        self._allocated = 0

    def zeros(self, numels: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """Make zeros [numel] for each of ``numels``: a tensor of the same name in each page to be allocated."""
        return (torch.zeros(numel, dtype=dtype, device=self.works_on) for numel in numels)

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Any] | None = None) -> int:
        """Keep a new page, these tensors of ``zeros`` by name. Returns its number.

        Args:
            visiting: tensors that rest away from the device, and are copied in and out with the page: each with the
                ``HostPage`` or ``DiskPage`` in which it rests. Of the tensor its dtype and length count.
        """
        assert not visiting, "what visits comes and goes: that takes a PagedStore"
        self._allocated += 1
        self._pages[self._allocated] = page
        return self._allocated

    def release(self, number: int) -> None:
        """Forget a page."""

    def prefetch(self, number: int) -> None:
        """Prepare for ``fetch`` of this page, which will follow soon."""

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        """Give the page's tensors on ``works_on``, to be read and written until ``commit``.

        The current stream waits for them. Two pages may be fetched at a time. Raises OffloadError for a lost page.
        """
        return self._pages[number]

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

    def residents(self) -> list[Tensor]:
        """Give the tensors that stay on the device between updates."""
        return []

    def drop_frames(self) -> None:
        """Free the device's memory that holds nothing between updates."""

    def make_frames(self) -> None:
        """Allocate again what ``drop_frames`` has freed."""

    def footprint(self) -> Mapping[str, int]:
        """Bytes taken, by memory: device, host, disk."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back. The pages are gone."""


class DeviceStore(StateStore):
    """Pages stay on the device: nothing moves, and what ``fetch`` gives is the state itself."""

    lookahead, keeps_views = 0, True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.works_on = device

    def zeros(self, numels: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        # They lie in one allocation: each costs ``sleep`` and ``wake`` a tenth of a millisecond (H200).
        rooms = [round_up(numel, FRAME_ALIGNMENT // dtype.itemsize) for numel in numels]
        parts = torch.zeros(sum(rooms), dtype=dtype, device=self.works_on).split(rooms)
        return (part[:numel] for part, numel in zip(parts, numels, strict=True))

    def release(self, number: int) -> None:
        keep_for_current_stream(*self._pages.pop(number).values())

    def residents(self) -> list[Tensor]:
        return [tensor for page in self._pages.values() for tensor in page.values()]

    def footprint(self) -> Mapping[str, int]:
        return {"device": sum(t.nbytes for t in self.residents() if is_there(t)), "host": 0, "disk": 0}


class HostStore(StateStore):
    """Pages are in host memory and are updated there: ZeRO-Offload (Ren et al., 2021).

    Attributes:
        memory, lanes: for the gradients and parameters that an update needs on the host beside its page.
        threads: so many an update uses.
    """

    lookahead = 1
    works_on = torch.device("cpu")

    def __init__(self, memory: HostMemory, lanes: Lanes, threads: int) -> None:
        super().__init__()
        self.memory, self.lanes, self.threads = memory, lanes, threads

    def zeros(self, numels: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        return (self.memory.take(numel * dtype.itemsize).view(dtype).zero_() for numel in numels)

    def release(self, number: int) -> None:
        for tensor in self._pages.pop(number).values():
            self.memory.give_back(tensor.view(torch.uint8))

    def use_room(self) -> None:
        self.memory.trim()

    def footprint(self) -> Mapping[str, int]:
        return {"device": 0, "host": self.memory.in_use, "disk": 0}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
