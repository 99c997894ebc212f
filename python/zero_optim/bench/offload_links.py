"""The limits of a store, measured by themselves: plain copies over the link to the device, plain reads and writes of a
disk. Only aligned memory and files are shared with the stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..params.layout import round_up
from ..stores.direct_file import DirectFile, Memory, memory_of
from ..stores.host_memory import ALIGNMENT, HostMemory

BLOCK_BYTES = 4 * 2**20
THREADS = 16
"""The fastest of 4 to 16 threads each way with blocks of 1 to 16 MiB, on a virtual disk: 6.1 GB/s written and 2.8 read;
the slowest wrote 5.3 and read 2.6."""


class Link:
    """Copies between host memory, pinned for a GPU, and two pages on the device, both ways at once.

    On a CPU they are copies from memory to memory, one after another.
    """

    def __init__(self, nbytes: int, page_bytes: int, device: torch.device) -> None:
        """``nbytes``: the most that ``move`` is asked for, one way."""
        self._device, self._page_bytes = device, page_bytes
        self._host = HostMemory(pinned=device.type == "cuda", device=device).take(max(nbytes, page_bytes)).zero_()
        self._arriving, self._leaving = (torch.zeros(page_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def move(self, to_device: int, to_host: int) -> None:
        """Copy so many bytes each way. On a GPU this returns before the copies end."""
        arrivals = [(self._arriving[: len(page)], page) for page in self._pages(to_device)]
        departures = [(page, self._leaving[: len(page)]) for page in self._pages(to_host)]
        if not self._streams:
            for target, source in (*arrivals, *departures):
                target.copy_(source)
            return
        for stream, copies in zip(self._streams, (arrivals, departures), strict=True):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)

    def _pages(self, nbytes: int) -> Iterator[Tensor]:
        for start in range(0, nbytes, self._page_bytes):
            yield self._host[start : min(start + self._page_bytes, nbytes)]


class DiskLink:
    """Reads and writes of large blocks, straight to the disk, by a few threads each way, both ways at once.

    Attributes:
        direct: whether past the system's cache (O_DIRECT).
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        """``nbytes``: the most that ``move`` is asked for, one way. So many are written when this returns."""
        self._opened = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it is open for as long as this is there
        self._file = DirectFile(self._opened.fileno())
        self.direct = self._file.direct
        self._blocks = max(-(-nbytes // BLOCK_BYTES), 1)
        self._memory = HostMemory(pinned=False).take(2 * THREADS * BLOCK_BYTES).fill_(1)
        self._readers, self._writers = (ThreadPoolExecutor(THREADS) for _ in range(2))
        self._file.reserve(0, self._blocks * BLOCK_BYTES)
        self.move(0, self._blocks * BLOCK_BYTES)

    def move(self, read: int, written: int) -> None:
        """Move so many bytes, rounded up to 4096. Writes are half a file ahead of reads, so that both go on at once."""
        parts: list[Future[Any]] = []
        for number in range(self._blocks):
            ahead = (number + self._blocks // 2) % self._blocks
            for pool, work, nbytes, place, first in (
                (self._readers, self._file.read, read, number, 0),
                (self._writers, self._file.write, written, ahead, THREADS),
            ):
                size = min(nbytes - number * BLOCK_BYTES, BLOCK_BYTES)
                if size > 0:
                    buffer = self._buffer(first + number % THREADS, round_up(size, ALIGNMENT))
                    parts.append(pool.submit(work, buffer, place * BLOCK_BYTES))
        for part in parts:
            part.result()

    def _buffer(self, number: int, nbytes: int) -> Memory:
        """Choose a block's buffer. Blocks may share one: their contents are not used."""
        start = number * BLOCK_BYTES
        return memory_of(self._memory[start : start + nbytes])
