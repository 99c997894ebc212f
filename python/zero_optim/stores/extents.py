"""The free parts of a file. Integers only: nothing here touches the file."""

from __future__ import annotations

from dataclasses import dataclass

from ..params.layout import round_up
from .host_memory import ALIGNMENT


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of ``ALIGNMENT``; an empty page takes one, too."""
    return max(round_up(nbytes, ALIGNMENT), ALIGNMENT)


@dataclass(frozen=True, eq=False)
class Extent:
    """The place of a page in its file. Two are never equal: a released one is never taken for a new one.

    Attributes:
        offset: of its first byte, a multiple of ``ALIGNMENT``.
        nbytes: of the page.
    """

    offset: int
    nbytes: int

    @property
    def space(self) -> int:
        """Bytes that it takes in the file, and that are read and written."""
        return aligned(self.nbytes)


class FreeSpace:
    """The free runs of a file, by offset. Neighbours are one run.

    Attributes:
        end: bytes of the file, free or not.
    """

    def __init__(self) -> None:
        self.end = 0
        self._runs: list[tuple[int, int]] = []  # offset and end

    def shortage(self, nbytes: int) -> int:
        """Count the bytes by which the file must grow before ``take`` of so many; 0 where a free run holds them."""
        if any(end - start >= nbytes for start, end in self._runs):
            return 0
        tail = self._runs[-1] if self._runs else (self.end, self.end)
        return nbytes - (tail[1] - tail[0] if tail[1] == self.end else 0)

    def grow(self, nbytes: int) -> None:
        """Add so many bytes to the end of the file, all free."""
        self.end += nbytes
        self.give_back(self.end - nbytes, nbytes)

    def take(self, nbytes: int) -> int:
        """Take so many bytes from the start of the first free run that holds them. Returns their offset.

        Raises ValueError where there is none: the file has to ``grow`` by the ``shortage`` before.
        """
        for place, (start, end) in enumerate(self._runs):
            if end - start >= nbytes:
                self._runs[place : place + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        raise ValueError(f"no free run of {nbytes} bytes")

    def give_back(self, offset: int, nbytes: int) -> None:
        """Make these bytes free again."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._runs, (offset, offset + nbytes)]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._runs = merged
