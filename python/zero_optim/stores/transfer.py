"""A page on its way between host memory and a file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent import futures

from ..errors import OffloadError


class Transfer:
    """Blocks of a page that the threads of a pool read or write. Each gives its checksum."""

    def __init__(self, what: str, blocks: Sequence[futures.Future[int]]) -> None:
        """``what``: which file, and which bytes of it, in words, for errors."""
        self._what = what
        self._blocks = blocks
        self._checksums: tuple[int, ...] | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, well or not: no thread uses the buffer any more."""
        return all(block.done() for block in self._blocks)

    def unfinished(self, seconds: float) -> int:
        """How many blocks are not over, well or not, after so long."""
        return len(futures.wait(self._blocks, seconds).not_done)

    def wait(self, seconds: float) -> None:
        """Until it is over.

        Raises OffloadError, naming file and bytes, where a block could not be read or written, ended early, or has
        another checksum; and where it is not over after ``seconds``: then the buffer is still in use. What the
        ``after`` of a write raises is raised as it is.
        """
        self.checksums(seconds)

    def checksums(self, seconds: float = 0) -> tuple[int, ...]:
        """Of each block, once it is over. Raises as ``wait``."""
        if self._checksums is None:
            waiting = self.unfinished(seconds)
            if waiting:
                raise OffloadError(
                    f"{self._what}: {waiting} of {len(self._blocks)} blocks were not over after {seconds:g} s; "
                    "the disk is very busy, or does not answer any more"
                )
            self._checksums = tuple(block.result() for block in self._blocks)
            self._blocks = ()  # a future is large beside what it gave
        return self._checksums


def wait_for_all(transfers: Iterable[Transfer], seconds: float) -> bool:
    """Whether all are over, well or not, after ``seconds`` at the most."""
    end = time.monotonic() + seconds
    return all(transfer.unfinished(max(end - time.monotonic(), 0)) == 0 for transfer in transfers)
