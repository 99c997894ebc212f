"""The patience with a disk: how long it is waited for.

What each outcome of a wait makes of a disk:

==========  =======  ========  =======
event       ANSWERS  BEHIND    SILENT
==========  =======  ========  =======
over        ANSWERS  ANSWERS   ANSWERS
late_write  BEHIND   BEHIND    SILENT
late_read   SILENT   SILENT    SILENT
==========  =======  ========  =======

- ANSWERS: reads and writes are waited for.
- BEHIND: reads are. A page that is not written yet stays in memory, so nothing is lost by it.
- SILENT: nobody waits. A page is lost already.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from ..errors import OffloadError
from .page_file import Transfer

PATIENCE_SECONDS = 120.0
"""How long a page may take. A disk that other jobs keep busy is slow, and one that has died does not answer at all. Far
less than other ranks wait for this one in a collective, so that they hear of it. So it is waited for once, and not for
each page."""


class DiskState(enum.Enum):
    """The state of a disk, as far as is known."""

    ANSWERS = enum.auto()
    BEHIND = enum.auto()
    SILENT = enum.auto()


class Patience:
    """The patience with one disk."""

    def __init__(self) -> None:
        self.disk = DiskState.ANSWERS

    def wait_for_read(self, transfer: Transfer) -> None:
        """Raises OffloadError, as ``Transfer``: what was to be read is lost then."""
        self._wait(transfer, self.disk is not DiskState.SILENT, self.late_read)

    def wait_for_write(self, transfer: Transfer) -> None:
        """Raises OffloadError, as ``Transfer``: nothing is lost by it."""
        self._wait(transfer, self.disk is DiskState.ANSWERS, self.late_write)

    def _wait(self, transfer: Transfer, patiently: bool, late: Callable[[], None]) -> None:
        try:
            transfer.wait(PATIENCE_SECONDS if patiently else 0.0)
        except OffloadError as error:
            if transfer.done:  # a disk that says that it has failed answers
                self.over()
                raise
            late()
            if patiently:
                raise
            raise OffloadError(f"{error}. A page before it was waited for {PATIENCE_SECONDS:g} s") from None
        self.over()

    def over(self) -> None:
        self.disk = DiskState.ANSWERS

    def late_read(self) -> None:
        self.disk = DiskState.SILENT

    def late_write(self) -> None:
        if self.disk is DiskState.ANSWERS:
            self.disk = DiskState.BEHIND
