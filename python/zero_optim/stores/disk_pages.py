"""Pages in a file on a local disk: ZeRO-Infinity's tier (Rajbhandari et al., 2021).

Six buffers in host memory hold the pages in flight. While page 4 is updated, the pages after it are read and the
pages before it are written::

    read      | 6 | 7 |
    buffers     5   4   3
    update          4
    written             | 3 | 2 |

The first transfer that fails ends the use of the disk: this rank's state is lost, and ``fetch`` raises from then on. So
nobody waits twice for a disk that hangs, and no buffer is reused that a thread may still access.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from ..errors import ClosedError, OffloadError
from ..params.layout import round_up
from .host_memory import ALIGNMENT, HostMemory, Mark
from .offload import HOST_BUFFERS, Copied

TIMEOUT_SECONDS = 120.0
"""The longest wait for a page. Far less than a collective's time-out, so that the other ranks hear of it."""

BLOCK_BYTES, THREADS = 4 * 2**20, 8
"""Bytes that a thread transfers at a time, and threads each way. Of plain O_DIRECT transfers, on a virtual disk that
writes 5 GB/s and reads 2.4, with two cores of an AMD EPYC, they reach 0.89 (writes) and 0.99 (reads). Blocks of 1 MiB
reach 0.81 and 0.87, four threads 0.74 and 0.91. Blocks of 8 MiB are a tenth slower for a page of 4 to 16 MiB."""

_LOST = "This rank's state is lost: make a new optimizer and load a checkpoint; with param_offload a new model, too"

Memory = ctypes.Array


def memory_of(buffer: Tensor) -> Memory:
    """View the bytes of ``buffer``: uint8, contiguous, on the host. The caller keeps it alive."""
    return (ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())


def set_direct(file: int) -> bool:
    """Set O_DIRECT on a new, empty file if its file system takes it: some refuse the flag, others its use. Returns
    whether it is set. Raises OSError where the file cannot be written at all."""
    flags, direct = fcntl.fcntl(file, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    buffer = HostMemory(pinned=False).take(ALIGNMENT).zero_()
    memory = memory_of(buffer)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct)
        os.pwritev(file, [memory], 0)
        os.preadv(file, [memory], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        os.pwritev(file, [memory], 0)
        direct = 0
    os.ftruncate(file, 0)
    return bool(direct)


class PageFile:
    """An unnamed file of this process, read and written in blocks by the threads of two pools.

    The system removes it with its last open descriptor, however the process ends. Reads never wait behind writes.

    Attributes:
        name: which file this is, for people.
        direct: whether it bypasses the system's cache (O_DIRECT).
        nbytes: its length, all of it reserved on the disk.
    """

    def __init__(self, folder: Path, rank: int, argument: str = "state_offload") -> None:
        """Raises OffloadError, naming ``argument`` and folder, where it is missing or cannot be written."""
        self.name, self.nbytes, self._pid = f"the page file of rank {rank} in {folder}", 0, os.getpid()
        try:
            with tempfile.TemporaryFile(dir=folder, prefix="zero-optim-") as file:
                self.file = os.dup(file.fileno())  # it has no name
        except OSError as error:
            why = f"no file can be made there: {error.strerror}"
            if not folder.is_dir():
                why = "that is no directory" if folder.exists() else "there is no such directory"
            raise OffloadError(
                f"{argument}='nvme:{folder}': {why}; give one on a fast local disk, on every machine"
            ) from error
        self._readers = ThreadPoolExecutor(THREADS, "zero-optim-read")
        self._writers = ThreadPoolExecutor(THREADS, "zero-optim-write")
        self._remove = weakref.finalize(self, _remove, self.file, self._pid, (self._readers, self._writers))
        from google_crc32c import value  # not imported with the package

        self._checksum = value  # 12 GB/s a thread on an AMD EPYC with AVX-512; it releases the GIL
        try:
            self.direct = set_direct(self.file)
        except OSError as error:
            self._remove()
            raise OffloadError(f"{argument}='nvme:{folder}': it cannot be written: {error.strerror}") from error

    def grow(self, nbytes: int) -> None:
        """Make the file at least so long, and reserve the space: a full disk raises OffloadError here, and in no write
        (copy-on-write systems excepted)."""
        if nbytes <= self.nbytes:
            return
        try:
            self._reserve(nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, self.nbytes)
            system = os.fstatvfs(self.file)
            raise OffloadError(
                f"{self.name} has {self.nbytes:,} bytes and needs {nbytes - self.nbytes:,} more: {error.strerror}; its "
                f"file system has {system.f_bavail * system.f_frsize:,} bytes free: make room there, or name another "
                "directory"
            ) from error
        self.nbytes = nbytes

    def _reserve(self, nbytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.file, self.nbytes, nbytes - self.nbytes)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
        zeros = HostMemory(pinned=False).take(2**20).zero_()  # for a file system that cannot reserve, such as NFS
        for start in range(self.nbytes, nbytes, zeros.numel()):
            memory = memory_of(zeros[: nbytes - start])
            if os.pwritev(self.file, [memory], start) < len(memory):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, offset: int, buffer: Tensor, after: Callable[[], None]) -> list[Future[int]]:
        """Begin to write ``buffer``, whose address and length are multiples of ALIGNMENT. Returns a future of each
        block's checksum. ``after`` is called first, in a thread: it waits for what fills the buffer."""
        ready = self._writers.submit(after)
        return [self._writers.submit(self._write_block, block, start, ready) for start, block in _cut(offset, buffer)]

    def read(self, offset: int, buffer: Tensor, checksums: Sequence[int]) -> list[Future[int]]:
        """Begin to read what ``write`` wrote there, with these checksums. Returns a future of each block."""
        blocks = zip(_cut(offset, buffer), checksums, strict=True)
        return [self._readers.submit(self._read_block, block, start, written) for (start, block), written in blocks]

    def _write_block(self, block: Tensor, offset: int, ready: Future[None]) -> int:
        ready.result()  # no deadlock: the pool began ``after`` before this block
        memory = memory_of(block)
        checksum = self._checksum(memory)
        self._transfer("writing", os.pwritev, memory, offset)
        return checksum

    def _read_block(self, block: Tensor, offset: int, written: int) -> int:
        memory = memory_of(block)
        self._transfer("reading", os.preadv, memory, offset)
        checksum = self._checksum(memory)
        if checksum != written:
            raise OffloadError(
                f"{self.name} is corrupted: {len(memory):,} bytes at {offset:,} have the checksum {checksum:08x}, and "
                f"had {written:08x} when they were written. {_LOST}"
            )
        return checksum

    def _transfer(self, verb: str, call: Callable[[int, list[Memory], int], int], memory: Memory, offset: int) -> None:
        """Read or write all of ``memory`` by one call. Raises OffloadError, also where the call does only a part."""
        what = f"{self.name}: {verb} {len(memory):,} bytes at {offset:,}"
        try:
            done = call(self.file, [memory], offset)
        except OSError as error:
            raise OffloadError(f"{what} failed: {error.strerror}. {_LOST}") from error
        if done < len(memory):
            raise OffloadError(f"{what} ended after {done:,}. {_LOST}")
        if not self.direct and hasattr(os, "posix_fadvise"):
            # Used once a step, it would only drive out of the cache what other processes read.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.file, offset, done, os.POSIX_FADV_DONTNEED)

    def check_usable(self) -> None:
        """Raise ClosedError after ``close``, and in a forked process: the file is its parent's."""
        if not self._remove.alive:
            raise ClosedError(f"{self.name} was closed: make a new optimizer")
        if os.getpid() != self._pid:
            raise ClosedError(f"{self.name} belongs to process {self._pid}, of which this one is a fork")

    def close(self, blocks: Sequence[Future[int]], seconds: float) -> None:
        """Wait for ``blocks``, those in flight, and remove the file. Again, or in a forked process, it does nothing."""
        if not self._remove.alive or os.getpid() != self._pid:
            return
        if not futures.wait(blocks, seconds).not_done:
            self._remove()
            return
        self._remove.detach()  # threads still use the descriptor: closed, its number may go to another file
        warnings.warn(f"{self.name}: the disk hangs; the space is free when this process ends", stacklevel=2)


def _cut(offset: int, buffer: Tensor) -> list[tuple[int, Tensor]]:
    """Cut ``buffer`` into blocks, each with its offset in the file."""
    blocks = buffer.split(BLOCK_BYTES)
    return [(offset + number * BLOCK_BYTES, block) for number, block in enumerate(blocks)]


def _remove(file: int, pid: int, pools: tuple[ThreadPoolExecutor, ...]) -> None:
    """Remove the file: by ``close``, when the owner is dropped, or at the process's end, once."""
    if os.getpid() != pid:
        return  # a forked process, such as a worker of a DataLoader, ends: the file is its parent's
    for pool in pools:
        pool.shutdown(wait=False)  # nothing is in flight: blocks keep the owner alive
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)  # a forked process has the file open, too: its space is free only now
    os.close(file)


class DiskBacking:
    """See ``HostBacking``. Pages are read and written whole, and verified against the checksums of their last write,
    which stay in memory.

    Args:
        argument: that names ``folder``, for messages.
        buffers: how many pages may be in host memory at a time.

    Attributes:
        failure: the first that a transfer had, in words.
        pages: by offset.
        reading, writing: oldest first.
        wanted: to be read as buffers become free, in order.
    """

    lookahead, at_once = 3, False

    def __init__(
        self,
        folder: Path,
        rank: int,
        memory: HostMemory,
        *,
        argument: str = "state_offload",
        buffers: int = HOST_BUFFERS,
    ) -> None:
        self.file, self.copied, self.memory = PageFile(folder, rank, argument), Copied(), memory
        self._count, self._timeout = buffers, TIMEOUT_SECONDS
        self.failure: str | None = None
        self.pages: list[DiskPage] = []
        self.reading: list[DiskPage] = []
        self.writing: list[DiskPage] = []
        self.wanted: dict[DiskPage, None] = {}
        self.free: list[Tensor] = []  # parts of ``_buffers``
        self._buffers: Tensor | None = None

    def allocate(self, nbytes: int) -> DiskPage:
        self.check()
        space = max(round_up(nbytes, ALIGNMENT), ALIGNMENT)
        offset = 0  # of the first gap between pages that is large enough, or after the last
        for other in self.pages:
            if other.offset - offset >= space:
                break
            offset = other.offset + other.space
        page = DiskPage(self, offset, nbytes, space)
        self.file.grow(offset + space)
        old = self._buffers
        if old is None or old.nbytes < self._count * space:
            larger = self.memory.take(self._count * space)  # where there is no memory for it, the old buffers stay
            for other in self.pages:
                other.leave_buffer()  # a thread may still use it
            if old is not None:
                self.memory.give_back(old)
                self.memory.trim()
            self._buffers, self.free = larger, list(larger.split(space))
        self.pages.append(page)
        self.pages.sort(key=lambda page: page.offset)
        return page

    @property
    def disk_bytes(self) -> int:
        return self.file.nbytes

    def close(self) -> None:
        blocks = [block for page in self.pages for block in page.blocks]
        self.file.close(blocks, self._timeout)

    # -- transfers -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within it an OffloadError is recorded, not raised: other ranks may wait for this one in a collective."""
        try:
            yield
        except OffloadError as error:
            warnings.warn(f"{error}. The next step or evaluation will raise, on every rank", stacklevel=2)

    def check(self) -> None:
        """Raise OffloadError where a transfer has failed, ClosedError after ``close`` and in a forked process."""
        self.file.check_usable()
        if self.failure is not None:
            raise OffloadError(self.failure)

    def wait_for(self, page: DiskPage, verb: str) -> list[int]:
        """Wait for a page's blocks. Returns their checksums. Raises OffloadError, and from then on ``check`` does."""
        self.check()
        seconds = self._timeout
        late = len(futures.wait(page.blocks, seconds).not_done)
        try:
            if late:
                self._timeout = 0.0  # ``close`` does not wait for it again
                raise OffloadError(
                    f"{self.file.name}: {verb} {page.nbytes:,} bytes at {page.offset:,} is not over after "
                    f"{seconds:g} s: {late} of {len(page.blocks)} blocks are in flight. {_LOST}"
                )
            checksums = [block.result() for block in page.blocks]
        except OffloadError as error:
            self.failure = str(error)
            raise
        page.blocks = []  # a future is large beside what it gave
        return checksums

    def begin_reads(self) -> None:
        """Begin to read pages that are wanted, as many as there are free buffers for. Never waits."""
        for page in [page for page in self.writing if page.is_over]:
            page.end_write()
        while self.wanted and self.free:
            next(iter(self.wanted)).begin_read()

    def lend(self) -> Tensor:
        """Take a free buffer; else that of the oldest write, once it is over; else that of the last read."""
        if not self.free and self.writing:
            self.writing[0].end_write()
        elif not self.free and self.reading:
            self.reading[-1].leave_buffer()  # of the page that is used last: it is read again
        if not self.free:
            raise RuntimeError("more pages are fetched at a time than there are buffers")
        return self.free.pop()


class PagePlace(enum.Enum):
    """The place of a page. All but ON_DISK have a buffer.

    The state of a page after each call:

    ==========  =======  =======  =======  =======
    event       ON_DISK  READING  HELD     WRITING
    ==========  =======  =======  =======  =======
    prefetch    READING  READING  HELD     WRITING
    fetch       HELD     HELD     HELD     HELD
    overwrite   HELD     error    HELD     error
    commit      error    error    WRITING  error
    discard     error    error    ON_DISK  error
    end_write   error    error    error    ON_DISK
    ==========  =======  =======  =======  =======

    ``prefetch`` never waits: a page stays WRITING unless its write is over, and ON_DISK unless a buffer is free. Then
    it is read as soon as one is.
    """

    ON_DISK = enum.auto()
    READING = enum.auto()
    HELD = enum.auto()
    WRITING = enum.auto()


class DiskPage:
    """See ``HostPage`` and the module.

    Attributes:
        backing: that it is a page of.
        offset, nbytes, space: where it begins in the file; its bytes; those that it takes there.
        blocks: of the transfer under way.
    """

    at_once = False

    def __init__(self, backing: DiskBacking, offset: int, nbytes: int, space: int) -> None:
        self.backing, self.offset, self.nbytes, self.space = backing, offset, nbytes, space
        self.place = PagePlace.ON_DISK
        self.blocks: list[Future[int]] = []
        self._checksums: list[int] = []  # of the last write
        self._buffer: Tensor | None = None

    @property
    def is_over(self) -> bool:
        """Whether no thread uses the buffer any more."""
        return all(block.done() for block in self.blocks)

    def prefetch(self) -> None:
        self.backing.check()
        self.backing.begin_reads()
        if self.place is PagePlace.ON_DISK:
            self.backing.wanted[self] = None
            self.backing.begin_reads()

    def fetch(self) -> Tensor:
        self.backing.check()
        if self.place is PagePlace.WRITING:
            self.end_write()
        if self.place is PagePlace.ON_DISK:
            self.begin_read()
        self.backing.begin_reads()
        if self.place is PagePlace.READING:
            self._end_read()
        return self._bytes(self.nbytes)

    def discard(self, mark: Mark) -> None:
        self._check("discard", PagePlace.HELD)
        mark.wait()  # else the next page would be read into what the device still copies
        self._give_back_buffer()

    def overwrite(self) -> Tensor:
        if self.place is not PagePlace.HELD:
            self.backing.check()  # first: after a failure the page may still be WRITING
        self._check("overwrite", PagePlace.ON_DISK, PagePlace.HELD)
        if self.place is PagePlace.ON_DISK:
            self._take_buffer(PagePlace.HELD)
        return self._bytes(self.nbytes)

    def commit(self, mark: Mark) -> None:
        self._check("commit", PagePlace.HELD)
        self.blocks = self.backing.file.write(self.offset, self._bytes(self.space), mark.wait)
        self.place = PagePlace.WRITING
        self.backing.copied.written += self.nbytes
        self.backing.writing.append(self)

    def end_write(self) -> None:
        self._check("end_write", PagePlace.WRITING)
        self._checksums = self.backing.wait_for(self, "writing")
        self.backing.writing.remove(self)
        self._give_back_buffer()

    def begin_read(self) -> None:
        self._take_buffer(PagePlace.READING)
        self.blocks = self.backing.file.read(self.offset, self._bytes(self.space), self._checksums)
        self.backing.copied.read += self.nbytes
        self.backing.reading.append(self)

    def _end_read(self) -> None:
        self.backing.wait_for(self, "reading")
        self.backing.reading.remove(self)
        self.place = PagePlace.HELD

    def leave_buffer(self) -> None:
        """Give the buffer back, after the transfer that is under way in it."""
        if self.place is PagePlace.WRITING:
            self.end_write()
        elif self.place is PagePlace.READING:
            self._end_read()
        if self.place is PagePlace.HELD:
            self._give_back_buffer()

    def release(self) -> None:
        with contextlib.suppress(OffloadError):  # ``fetch`` of the next page raises it, too
            self.leave_buffer()
        self.backing.wanted.pop(self, None)
        if self.is_over:  # else threads still use its space
            self.backing.pages.remove(self)

    def _take_buffer(self, place: PagePlace) -> None:
        self.backing.wanted.pop(self, None)
        self._buffer, self.place = self.backing.lend(), place

    def _give_back_buffer(self) -> None:
        assert self._buffer is not None
        self.backing.free.append(self._buffer)
        self._buffer, self.place = None, PagePlace.ON_DISK

    def _bytes(self, nbytes: int) -> Tensor:
        assert self._buffer is not None
        return self._buffer[:nbytes]

    def _check(self, event: str, *allowed: PagePlace) -> None:
        if self.place not in allowed:
            raise RuntimeError(f"{event} of a page that is {self.place.name}")
