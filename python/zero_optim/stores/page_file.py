"""Pages in a file: space for them, transfers in the background, and checksums that find what the disk lost.

The file has no name, as ``tempfile.TemporaryFile`` makes it. So the system removes it with its last open descriptor,
however the process ends: nothing is left in the folder, and processes that share the folder do not meet.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ClosedError, OffloadError
from .direct_file import DirectFile, checksum_function, memory_of
from .extents import Extent, FreeSpace
from .host_memory import ALIGNMENT

BLOCK_BYTES = 4 * 2**20
"""Bytes that a thread reads or writes at a time. Each block has a checksum of its own.

Bandwidth of a 256 MiB page as a share of plain O_DIRECT reads and writes in the same run, median of 7, on a virtual
disk that writes 5 GB/s and reads 2.4, with two cores of an AMD EPYC:

    block    write, 4 threads    8 threads    read, 4 threads    8 threads
    1 MiB    0.72                0.81         0.88               0.87
    4 MiB    0.74                0.89         0.91               0.99
    8 MiB    0.83                0.95         0.93               0.96

Pages of 4 MiB to 16 MiB, one at a time, are a tenth faster in blocks of 4 MiB than of 8: more threads share a page.
"""

CLOSE_SECONDS = 60.0
"""The longest that ``close`` waits for transfers."""

_BUG = "this is a bug in zero-optim, please report it"
_LOST = "the state that was there is lost: start again from a checkpoint"


class Transfer:
    """A page on its way between host memory and the file: blocks that threads of a pool read or write.

    Each block gives its checksum.
    """

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
        """Count the blocks that are not over, well or not, after so long."""
        return len(futures.wait(self._blocks, seconds).not_done)

    def wait(self, seconds: float) -> None:
        """Wait until it is over.

        Raises OffloadError, naming file and bytes, where a block could not be read or written, ended early, or has
        another checksum; and where it is not over after ``seconds``: then the buffer is still in use. An error of
        a write's ``after`` is raised as it is.
        """
        self.checksums(seconds)

    def checksums(self, seconds: float = 0) -> tuple[int, ...]:
        """Give the checksum of each block, once it is over. Raises as ``wait``."""
        # Taken from the futures, and kept. A future of a block that failed raises at every call.
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


@dataclass
class _LastTransfers:
    """The last transfers of an extent, each way; None before the first."""

    written: Transfer | None = None
    read: Transfer | None = None


class PageFile:
    """A file of this process that holds pages while they are not in use. Used by one thread at a time.

    A page is written and read as a whole, by the threads of two pools: reads never wait behind writes. Its bytes are
    checked against the checksums of its last write, which stay in memory. The file is good for this process alone, and
    is not synced.

    Attributes:
        name: which file this is, for people.
        direct: whether it is read and written past the system's cache (O_DIRECT).
    """

    def __init__(self, folder: Path, *, rank: int, threads: int = 8) -> None:
        """Make a new file in ``folder``.

        Args:
            threads: so many read, and as many write: the number of blocks in flight each way.

        Raises OffloadError, naming the folder, where it is missing, not writable or full.
        """
        self.name = f"the page file of rank {rank} in {folder}"
        file = _open_nameless(folder)
        self._pid = os.getpid()
        self._readers = futures.ThreadPoolExecutor(threads, "zero-optim-read")
        self._writers = futures.ThreadPoolExecutor(threads, "zero-optim-write")
        self._remove = weakref.finalize(self, _remove, file, self._pid, (self._readers, self._writers))
        try:
            self._file = DirectFile(file)
        except OSError as error:
            self._remove()
            raise OffloadError(f"state_offload='nvme:{folder}': it cannot be written: {error.strerror}") from error
        self.direct = self._file.direct
        self._space = FreeSpace()
        self._extents: dict[Extent, _LastTransfers] = {}
        self._checksum = checksum_function()

    # -- space ---------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Length of the file: all extents, and what lies free between them."""
        return self._space.end

    def allocate(self, nbytes: int) -> Extent:
        """Take space for a page. Raises OffloadError, naming the file, bytes wanted and bytes free.

        The space is reserved: a full disk raises here, and in no write (copy-on-write systems excepted).
        """
        self._check_open()
        wanted = Extent(0, nbytes).space
        shortage = self._space.shortage(wanted)
        if shortage:
            self._grow(shortage)
        extent = Extent(self._space.take(wanted), nbytes)
        self._extents[extent] = _LastTransfers()
        return extent

    def _grow(self, nbytes: int) -> None:
        try:
            self._file.reserve(self._space.end, nbytes)
        except OSError as error:
            raise OffloadError(
                f"{self.name} has {self._space.end:,} bytes and needs {nbytes:,} more: {error.strerror}; its file "
                f"system has {self._file.free_bytes():,} bytes free: make room there, or name another directory"
            ) from error
        self._space.grow(nbytes)

    def release(self, extent: Extent) -> None:
        """Leave the extent's space to other pages. No transfer of it may be under way."""
        self._idle(extent)
        del self._extents[extent]
        self._space.give_back(extent.offset, extent.space)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def write(self, extent: Extent, buffer: Tensor, after: Callable[[], None] | None = None) -> Transfer:
        """Begin to write a page.

        Args:
            buffer: uint8 [at least ``extent.space``], its address a multiple of 4096, as ``HostMemory`` gives it. It is
                not to be changed until the transfer is done.
            after: called first, in a thread of the pool; for instance, it waits until a GPU has filled the buffer. It
                may block, and it must not wait for another transfer.

        A page that could not be written cannot be read any more; its values are still in ``buffer``.
        """
        last = self._idle(extent)
        ready = self._writers.submit(after) if after is not None else None
        blocks = [
            self._writers.submit(self._write_block, block, offset, ready) for offset, block in _blocks(extent, buffer)
        ]
        last.written = Transfer(self._words("writing", extent), blocks)
        return last.written

    def read(self, extent: Extent, buffer: Tensor) -> Transfer:
        """Begin to read a page, which has been written.

        Args:
            buffer: as that of ``write``. Its bytes are those of the page if, and only if, the transfer's ``wait``
                returns.
        """
        last = self._idle(extent)
        if last.written is None:
            raise OffloadError(f"{self._words('reading', extent)}: nothing was ever written there; {_BUG}")
        checksums = last.written.checksums()  # raises for a page that could not be written
        blocks = [
            self._readers.submit(self._read_block, block, offset, checksum)
            for (offset, block), checksum in zip(_blocks(extent, buffer), checksums, strict=True)
        ]
        last.read = Transfer(self._words("reading", extent), blocks)
        return last.read

    def _idle(self, extent: Extent) -> _LastTransfers:
        """Give the extent's last transfers. Raises OffloadError where one is still under way."""
        self._check_open()
        last = self._extents.get(extent)
        if last is None:
            raise OffloadError(f"{self.name}: {extent} was released; {_BUG}")
        if not all(transfer.done for transfer in (last.written, last.read) if transfer is not None):
            raise OffloadError(f"{self.name}: {extent} is still being written or read; {_BUG}")
        return last

    def _words(self, verb: str, extent: Extent) -> str:
        return f"{verb} {extent.nbytes:,} bytes at {extent.offset:,} of {self.name}"

    def _write_block(self, block: Tensor, offset: int, ready: futures.Future[None] | None) -> int:
        """Write, in a thread of the pool. Returns the checksum of what was to be written."""
        if ready is not None:
            ready.result()  # no deadlock: the pool has begun ``after`` before this block
        memory = memory_of(block)
        try:
            checksum = self._checksum(memory)
            self._file.write(memory, offset)
        except OSError as error:
            raise OffloadError(
                f"{self.name}: {len(memory):,} bytes at {offset:,} could not be written: {error.strerror}; its file "
                f"system is at fault, which has {self._file.free_bytes():,} bytes free. What was to be written is "
                "still in host memory"
            ) from error
        return checksum

    def _read_block(self, block: Tensor, offset: int, expected: int) -> int:
        """Read, in a thread of the pool. Returns the checksum, which is as expected."""
        memory = memory_of(block)
        nbytes = len(memory)
        try:
            found = self._file.read(memory, offset)
        except OSError as error:
            raise OffloadError(
                f"{self.name}: {nbytes:,} bytes at {offset:,} could not be read: {error.strerror}; {_LOST}"
            ) from error
        if found < nbytes:
            raise OffloadError(
                f"{self.name} was cut off: of {nbytes:,} bytes at {offset:,}, {found:,} are there; {_LOST}"
            )
        checksum = self._checksum(memory)
        if checksum != expected:
            raise OffloadError(
                f"{self.name} is damaged: the {nbytes:,} bytes at {offset:,} have the checksum {checksum:08x}, and "
                f"{expected:08x} when they were written; {_LOST}"
            )
        return checksum

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for transfers, and remove the file. A second call, or one in a forked process, does nothing.

        Raises OffloadError where transfers are not over after ``seconds``. The file goes when the process ends then.
        """
        # A fork has none of the threads that could end transfers, and the file is its parent's.
        if not self._remove.alive or os.getpid() != self._pid:
            return
        transfers = [t for last in self._extents.values() for t in (last.written, last.read) if t is not None]
        if wait_for_all(transfers, seconds):
            self._remove()
            return
        self._remove.detach()  # the descriptor stays open: its number may go to another file, and threads use it still
        raise OffloadError(
            f"{self.name}: transfers are not over after {seconds:g} s; the disk does not answer any more"
        )

    def _check_open(self) -> None:
        if not self._remove.alive:
            raise ClosedError(f"{self.name} was closed: make a new optimizer")
        if os.getpid() != self._pid:
            raise ClosedError(f"{self.name} belongs to process {self._pid}, of which this one is a fork")


def _open_nameless(folder: Path) -> int:
    """A descriptor of a new, empty file. Raises OffloadError, naming the folder, where none can be made in it."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="zero-optim-") as file:
            return os.dup(file.fileno())
    except OSError as error:
        name, remedy = f"state_offload='nvme:{folder}'", "give one on a fast local disk, on every machine"
        if not folder.exists():
            raise OffloadError(f"{name}: there is no such directory; {remedy}") from error
        if not folder.is_dir():
            raise OffloadError(f"{name}: that is no directory; {remedy}") from error
        raise OffloadError(f"{name}: no file can be made there: {error.strerror}; {remedy}") from error


def _remove(file: int, pid: int, pools: tuple[futures.ThreadPoolExecutor, ...]) -> None:
    """Remove the file: by ``close``, when the owner is dropped, or at the process's end, once."""
    if os.getpid() != pid:
        return  # a forked process, such as a worker of a DataLoader, ends: the file is its parent's
    for pool in pools:
        pool.shutdown(wait=False)  # nothing is in flight: each transfer keeps the owner alive
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)  # a forked process has the file open, too: its space is free only now
    os.close(file)


def wait_for_all(transfers: Iterable[Transfer], seconds: float) -> bool:
    """Wait until all are over, well or not, at most ``seconds``. Returns whether they are."""
    end = time.monotonic() + seconds
    return all(transfer.unfinished(max(end - time.monotonic(), 0)) == 0 for transfer in transfers)


def _blocks(extent: Extent, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cut ``buffer`` into blocks, each with its offset in the file."""
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise ValueError(f"the buffer must be contiguous, uint8 and on the host, got {buffer.dtype} on {buffer.device}")
    if buffer.data_ptr() % ALIGNMENT or buffer.numel() < extent.space:
        raise ValueError(f"the buffer must be aligned and hold {extent.space} bytes, got {buffer.numel()}")
    for start in range(0, extent.space, BLOCK_BYTES):
        yield extent.offset + start, buffer[start : min(start + BLOCK_BYTES, extent.space)]
