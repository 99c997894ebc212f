"""Homes of pages: where they rest while they are away from the device. ``HostHomes`` and ``DiskHomes`` make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..errors import OffloadError
from .lanes import Mark
from .state_store import Copied


class Home(Protocol):
    """The home of one page: there it rests while it is away."""

    def expect(self) -> None:
        """Prepare for ``incoming``, which will follow soon."""

    def incoming(self) -> Tensor:
        """Give the page, to be copied from: [nbytes] uint8 in host memory. Raises OffloadError where it is lost."""

    def unchanged(self, mark: Mark) -> None:
        """End ``incoming`` of a page that was only read. Nobody reads the memory once the mark has passed."""

    def outgoing(self) -> Tensor:
        """Give memory to copy the page to: [nbytes] uint8 on the host."""

    def filled(self, mark: Mark) -> None:
        """End ``outgoing``: the page is in that memory once the mark has passed."""

    def release(self) -> None:
        """Forget the page."""


class Homes(Protocol):
    """The homes of a store's pages, and what they take of each memory.

    Attributes:
        lookahead: how many pages are worth expecting while one is updated.
        at_once: whether an expected page can be copied in at once, or has to be read first.
        copied: bytes moved so far.
    """

    lookahead: int
    at_once: bool
    copied: Copied

    def make(self, nbytes: int) -> Home: ...

    def take_problems(self) -> Mapping[Home, OffloadError]:
        """Give the errors of writes that failed since the last call."""

    def trim(self) -> None:
        """Give back host memory that nothing uses."""

    def end_writes(self) -> None:
        """Block the host until no write to a disk is under way."""

    def footprint(self) -> Mapping[str, int]:
        """Give bytes taken, by memory: host, disk."""

    def close(self) -> None: ...
