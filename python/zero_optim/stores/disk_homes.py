"""Pages that rest in a file: ZeRO-Infinity's tier (Rajbhandari et al., 2021).

A few buffers in host memory are lent to the pages that are on their way. While page 4 is updated, the pages that follow
are read, and the ones before are written::

    read      | 6 | 7 |
    buffers     5   4   3
    update          4
    written             | 3 | 2 |

The place of a page after each call. ``outgoing`` follows ``incoming``, unless the page is new:

==========  =======  =======  =======  =======  =======  =====
event       ON_DISK  READING  HELD     WRITING  KEPT     LOST
==========  =======  =======  =======  =======  =======  =====
expect      READING  READING  HELD     WRITING  KEPT     LOST
incoming    HELD     HELD     HELD     HELD     KEPT     error
outgoing    HELD     error    HELD     error    KEPT     error
filled      error    error    WRITING  error    WRITING  error
unchanged   error    error    ON_DISK  error    KEPT     error
end_write   error    error    error    ON_DISK  error    error
==========  =======  =======  =======  =======  =======  =====

Where the disk fails:

- ``end_write`` makes a page KEPT: it stays in host memory, and the next ``filled`` writes it again. Where the failed
  write is not over even then, the page stays KEPT.
- ``incoming`` makes it LOST, and raises.

``expect`` never waits:

- A page that is being written stays WRITING, unless the write is over: then ``end_write`` comes first.
- Without a free buffer a page stays ON_DISK. Whenever a page is wanted, comes or leaves, it is tried again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from ..errors import OffloadError
from .extents import Extent
from .homes import Home
from .host_memory import HostMemory
from .lanes import Mark
from .offload import HOST_BUFFERS
from .page_file import PageFile, Transfer
from .patience import Patience
from .state_store import Copied

LOOKAHEAD = 3


class PagePlace(enum.Enum):
    """The place of a page's only good copy. READING, HELD and WRITING pages have a buffer, KEPT ones own memory."""

    ON_DISK = enum.auto()
    READING = enum.auto()
    HELD = enum.auto()
    WRITING = enum.auto()
    KEPT = enum.auto()
    LOST = enum.auto()


class DiskHomes:
    """See ``Homes``."""

    lookahead, at_once = LOOKAHEAD, False

    def __init__(self, file: PageFile, memory: HostMemory) -> None:
        self.file, self.memory, self.copied = file, memory, Copied()
        self._homes: list[_DiskHome] = []
        self._buffer_bytes = 0
        self._free: list[Tensor] = []
        # Those that began first, or are wanted first, in front.
        self.reading: list[_DiskHome] = []
        self.writing: list[_DiskHome] = []
        self._wanted: list[_DiskHome] = []  # to be read as there are buffers
        self.patience = Patience()
        self.problems: dict[Home, OffloadError] = {}  # not reported yet

    def make(self, nbytes: int) -> Home:
        home = _DiskHome(self, self.file.allocate(nbytes))
        try:
            self._fit_buffers(home.extent.space)
        except BaseException:
            self.file.release(home.extent)
            raise
        self._homes.append(home)
        return home

    def trim(self) -> None:
        self.memory.trim()

    def take_problems(self) -> Mapping[Home, OffloadError]:
        self.end_writes_that_are_over()
        problems, self.problems = self.problems, {}
        return problems

    def end_writes_that_are_over(self) -> None:
        for home in [home for home in self.writing if home.transfer is not None and home.transfer.done]:
            home.end_write()

    def end_writes(self) -> None:
        while self.writing:
            self.writing[0].end_write()

    def footprint(self) -> Mapping[str, int]:
        return {"host": self.memory.in_use, "disk": self.file.nbytes}

    def close(self) -> None:
        self.file.close()

    # -- buffers -------------------------------------------------------------------------------------------------

    def _fit_buffers(self, nbytes: int) -> None:
        """Make buffers for a page of that size. Where there is no memory for them, the old buffers stay."""
        if nbytes <= self._buffer_bytes:
            return
        # All are taken before an old one is given up: where host memory runs short, the optimizer goes on.
        larger: list[Tensor] = []
        try:
            for _ in range(HOST_BUFFERS):
                larger.append(self.memory.take(nbytes))
        except BaseException:
            self._forget(larger)
            raise
        # A thread may still read or write an old one.
        for home in self._homes:
            home.let_go_of_buffer()
        self._forget(self._free)
        self._free, self._buffer_bytes = larger, nbytes

    def _forget(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self.memory.give_back(buffer)
        self.memory.trim()

    def want(self, home: _DiskHome) -> None:
        """Read the page as soon as a buffer is free."""
        if home not in self._wanted:
            self._wanted.append(home)
        self.begin_reads()

    def begin_reads(self) -> None:
        """Begin to read pages that are wanted, without waiting: as many as there are buffers for."""
        self.end_writes_that_are_over()
        while self._wanted and self._free:
            self._wanted.pop(0).begin_read()

    def no_longer_wants(self, home: _DiskHome) -> None:
        if home in self._wanted:
            self._wanted.remove(home)

    def lend(self) -> Tensor:
        """Take a free buffer; else that of the oldest write, once it is over; else that of the last read."""
        while not self._free:
            if self.writing:
                self.writing[0].end_write()
            # The page whose read began last is wanted last. It is read again then.
            elif self.reading:
                last = self.reading[-1]
                last.let_go_of_buffer()
                if last.place is PagePlace.ON_DISK:  # else it was found lost
                    self._wanted.append(last)
            else:
                raise OffloadError(f"{self.file.name}: no buffer is left: the disk, or host memory, has failed before")
        return self._free.pop()

    def replace_buffer(self) -> None:
        """Replace a buffer that now keeps a page which could not be written, or that a thread may still use. Without
        memory for another there is a buffer less."""
        with suppress(OffloadError):
            self._free.append(self.memory.take(self._buffer_bytes))

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    def forget(self, home: _DiskHome) -> None:
        self.no_longer_wants(home)
        self._homes.remove(home)


class _DiskHome:
    """The home of one page. See the module."""

    def __init__(self, homes: DiskHomes, extent: Extent) -> None:
        self._homes, self.extent = homes, extent
        self.place = PagePlace.ON_DISK
        self.transfer: Transfer | None = None
        self._buffer: Tensor | None = None
        self._kept: Tensor | None = None  # its memory after a write that failed
        self._why_lost = ""

    def expect(self) -> None:
        # ``expect`` never waits: a page that is still being written stays so, and ``incoming`` waits.
        if self.place is PagePlace.WRITING and self.transfer is not None and self.transfer.done:
            self.end_write()
        if self.place is PagePlace.ON_DISK:
            self._homes.want(self)

    def incoming(self) -> Tensor:
        if self.place is PagePlace.WRITING:
            self.end_write()
        if self.place is PagePlace.ON_DISK:
            self.begin_read()
        self._homes.begin_reads()
        if self.place is PagePlace.READING:
            self._end_read()
        if self.place is PagePlace.LOST:
            raise OffloadError(self._why_lost)
        return self._run()

    def unchanged(self, mark: Mark) -> None:
        self._check("unchanged", PagePlace.HELD, PagePlace.KEPT)
        if self.place is PagePlace.HELD:
            mark.wait()  # else the next page would be read into what the device still copies
            self._give_back_buffer()
            self.place = PagePlace.ON_DISK

    def outgoing(self) -> Tensor:
        self._check("outgoing", PagePlace.ON_DISK, PagePlace.HELD, PagePlace.KEPT)
        # All of the page is going to be overwritten, so it need not be read from the disk.
        if self.place is PagePlace.ON_DISK:
            self._homes.no_longer_wants(self)
            self._buffer, self.place = self._homes.lend(), PagePlace.HELD
        return self._run()

    def filled(self, mark: Mark) -> None:
        self._check("filled", PagePlace.HELD, PagePlace.KEPT)
        self._homes.begin_reads()
        if self.transfer is not None and not self.transfer.done:  # the disk does not answer: the page stays KEPT
            self._homes.problems[self] = OffloadError(f"{self._homes.file.name} does not answer")
            return
        whole = self._kept if self._kept is not None else self._whole_buffer()
        self.transfer, self.place = self._homes.file.write(self.extent, whole, mark.wait), PagePlace.WRITING
        self._homes.copied.written += self.extent.nbytes
        self._homes.writing.append(self)

    def release(self) -> None:
        self.let_go_of_buffer()
        if self.transfer is None or self.transfer.done:  # else a disk that does not answer still uses both
            self._forget_kept()
            self._homes.file.release(self.extent)
        self._homes.forget(self)

    def let_go_of_buffer(self) -> None:
        """Give the buffer back, after the read or write that is under way in it."""
        if self.place is PagePlace.WRITING:
            self.end_write()
        elif self.place is PagePlace.READING:
            self._end_read()
        if self.place is PagePlace.HELD:
            self._give_back_buffer()
            self.place = PagePlace.ON_DISK

    # -- transfers -----------------------------------------------------------------------------------------------

    def end_write(self) -> None:
        """End the write. Where it has failed, the page is kept, and the problem noted."""
        self._check("end_write", PagePlace.WRITING)
        assert self.transfer is not None
        try:
            self._homes.patience.wait_for_write(self.transfer)
        except OffloadError as error:
            self._homes.problems[self], self.place = error, PagePlace.KEPT
            if self._kept is None:  # in its buffer, which a thread may still read; another takes the buffer's place
                self._kept, self._buffer = self._buffer, None
                self._homes.replace_buffer()
        else:
            self._forget_kept()  # a page that was kept is on the disk at last
            self.place = PagePlace.ON_DISK
        self._homes.writing.remove(self)
        self._give_back_buffer()

    def begin_read(self) -> None:
        self._homes.no_longer_wants(self)
        self._buffer = self._homes.lend()
        self.transfer, self.place = self._homes.file.read(self.extent, self._buffer), PagePlace.READING
        self._homes.copied.read += self.extent.nbytes
        self._homes.reading.append(self)

    def _end_read(self) -> None:
        assert self.transfer is not None
        try:
            self._homes.patience.wait_for_read(self.transfer)
        except OffloadError as error:
            self._why_lost, self.place = str(error), PagePlace.LOST
            if self.transfer.done:
                self._give_back_buffer()
            else:  # a thread may still write the buffer
                self._buffer = None
                self._homes.replace_buffer()
        else:
            self.place = PagePlace.HELD
        self._homes.reading.remove(self)

    def _check(self, event: str, *allowed: PagePlace) -> None:
        if self.place not in allowed:
            raise RuntimeError(f"{event} of a page that is {self.place.name}")

    # -- memory --------------------------------------------------------------------------------------------------

    def _run(self) -> Tensor:
        whole = self._kept if self._kept is not None else self._whole_buffer()
        return whole[: self.extent.nbytes]

    def _whole_buffer(self) -> Tensor:
        assert self._buffer is not None
        return self._buffer[: self.extent.space]

    def _give_back_buffer(self) -> None:
        if self._buffer is not None:
            self._homes.give_back(self._buffer)
            self._buffer = None

    def _forget_kept(self) -> None:
        if self._kept is not None:
            self._homes.memory.give_back(self._kept)
            self._kept = None


def make_disk_homes(folder: Path, rank: int, memory: HostMemory) -> DiskHomes:
    return DiskHomes(PageFile(folder, rank=rank), memory)
