"""The patience with a disk: how long its reads and writes are waited for.

The state of a disk after each outcome of a wait:

==========  =======  ========  =======
event       ANSWERS  BEHIND    SILENT
==========  =======  ========  =======
over        ANSWERS  ANSWERS   ANSWERS
late_write  BEHIND   BEHIND    SILENT
late_read   SILENT   SILENT    SILENT
==========  =======  ========  =======

- ANSWERS: reads and writes are waited for.
- BEHIND: reads are, and writes are not. A page that is not written yet stays in memory, so nothing is lost.
- SILENT: neither is. A page is lost already.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from ..errors import OffloadError
from .page_file import Transfer

PATIENCE_SECONDS = 120.0
"""The longest wait for a page: a disk that other jobs keep busy is slow, and a dead one does not answer at all. It is
far less than a collective's time-out, so that other ranks hear of it. So a late disk is not waited for page by page."""


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
        """Wait for a read. Raises OffloadError, as ``Transfer.wait``: the page is lost then."""
        self._wait(transfer, self.disk is not DiskState.SILENT, self.late_read)

    def wait_for_write(self, transfer: Transfer) -> None:
        """Wait for a write. Raises OffloadError, as ``Transfer.wait``: nothing is lost by it."""
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
