"""State stores: where state is between updates. A *page* is the state of one shard.

``StateStore`` is the protocol, and ``make_store`` makes the one that ``state_offload`` chooses. Pages of a
``DeviceStore`` or a ``HostStore`` stay where they are updated; those of a ``PagedStore`` move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..comm.streams import is_there, keep_for_current_stream
from .disk_pages import DiskBacking
from .host_memory import HostMemory
from .lanes import Lanes, make_lanes
from .offload import Copied, Offload, Tier
from .paged_store import HostBacking, PagedStore

_RESERVE = 0.05
"""Fraction of the device's memory that a budget of "auto" leaves free: for fragments, and for larger steps."""


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
    """The common methods of stores whose pages never move."""

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


class HostStore(PagesStay):
    """Pages are in host memory and are updated there: ZeRO-Offload (Ren et al., 2021).

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


def make_store(
    offload: Offload, device: torch.device, rank: int, *, params_on_host: bool, threads: int = 1
) -> StateStore:
    """``params_on_host``: whether shards of parameters rest in host memory, and visit the device for each update.
    ``threads``: so many an update on the host uses.

    Raises OffloadError where there is no such folder, or no room in it.
    """
    if offload.tier is Tier.DEVICE and not params_on_host:
        return DeviceStore(device)
    memory, lanes = HostMemory(pinned=device.type == "cuda", device=device), make_lanes(device)
    if offload.tier is Tier.CPU:
        return HostStore(memory, lanes, threads)
    if offload.folder is not None:
        return PagedStore(device, lanes, DiskBacking(offload.folder, rank, memory), 0)
    if offload.tier is Tier.DEVICE:
        return PagedStore(device, lanes, HostBacking(memory), math.inf)
    if offload.device_budget is not None:
        return PagedStore(device, lanes, HostBacking(memory), offload.device_budget)
    if device.type != "cuda":
        return PagedStore(device, lanes, HostBacking(memory), math.inf)  # the host's memory is the device's
    return PagedStore(device, lanes, HostBacking(memory), 0, lambda: _room(device))


def _room(device: torch.device) -> int:
    """Count the free bytes. Two steps are over, so torch's allocator already has what activations need."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(_RESERVE * total))
