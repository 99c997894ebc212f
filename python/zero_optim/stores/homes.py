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
        """End ``incoming``, after which the page was only read: the memory is of no use once the mark has passed."""

    def outgoing(self) -> Tensor:
        """Give memory to copy the page to: [nbytes] uint8 on the host."""

    def filled(self, mark: Mark) -> None:
        """End ``outgoing``: the page is in that memory once the mark has passed."""

    def release(self) -> None:
        """Forget the page."""


class Homes(Protocol):
    """Makes homes, and knows what they take.

    Attributes:
        lookahead: how many pages are worth expecting while one is updated.
        at_once: whether an expected page can be copied in at once, or has to be read first.
        copied: what has moved.
    """

    lookahead: int
    at_once: bool
    copied: Copied

    def make(self, nbytes: int) -> Home: ...

    def take_problems(self) -> Mapping[Home, OffloadError]:
        """Say why pages could not be written since this was last asked."""

    def trim(self) -> None:
        """Give back host memory that nothing uses."""

    def end_writes(self) -> None:
        """The host waits until nothing is on its way to a disk."""

    def footprint(self) -> Mapping[str, int]:
        """Give bytes taken, by memory: host, disk."""

    def close(self) -> None: ...
