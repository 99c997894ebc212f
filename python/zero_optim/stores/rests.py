"""Rests of an optimizer's device memory while it sleeps: host memory, or a file. Either is kept for the next sleep.

A rest saves a sequence of flat tensors, [bytes] uint8 on the device. Each is copied once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import OffloadError
from ..params.layout import round_up
from .extents import Extent
from .host_memory import ALIGNMENT, HostMemory
from .lanes import Lane, make_lanes
from .page_file import PageFile, Transfer
from .patience import PATIENCE_SECONDS

CHUNK_BYTES = 64 * 2**20
"""Bytes that go to a file at a time, by way of two buffers of that size: two blocks for each thread that writes."""


class Rest(Protocol):
    """A place to rest."""

    def save(self, flats: Sequence[Tensor]) -> None:
        """Copy all ``flats``, in place of what was saved before. Raises OffloadError; ``flats`` are not changed."""

    def load(self, flats: Sequence[Tensor]) -> None:
        """Copy the first ``len(flats)`` saved tensors into ``flats``, of the sizes saved. Raises OffloadError."""

    def footprint(self) -> Mapping[str, int]:
        """Bytes taken, by memory: host, disk."""

    def close(self) -> None:
        """Give everything back."""


class HostRest:
    """Host memory, pinned where a GPU copies: one run, in which the tensors lie one after another."""

    def __init__(self, device: torch.device) -> None:
        self._memory = HostMemory(pinned=device.type == "cuda", device=device)
        self._lanes = make_lanes(device)
        self._run = self._memory.take(0)

    def save(self, flats: Sequence[Tensor]) -> None:
        needed = sum(round_up(flat.nbytes, ALIGNMENT) for flat in flats)
        if self._run.nbytes < needed:
            self.close()  # before more is taken: host memory need not hold both
            self._run = self._memory.take(needed)
        self._copy(self._lanes.to_host, self._places(flats), flats)

    def load(self, flats: Sequence[Tensor]) -> None:
        self._copy(self._lanes.to_device, flats, self._places(flats))

    def _copy(self, lane: Lane, targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
        """Copy, after earlier work of the device, which may use the memory. The host waits until it is over."""
        now, over = self._lanes.mark(), self._lanes.mark()
        now.set()
        lane.after(now)
        for target, source in zip(targets, sources, strict=True):
            lane.copy(target, source)
        lane.set(over)
        over.wait()

    def _places(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        start = 0
        for flat in flats:
            yield self._run[start : start + flat.nbytes]
            start += round_up(flat.nbytes, ALIGNMENT)

    def footprint(self) -> Mapping[str, int]:
        return {"host": self._memory.in_use, "disk": 0}

    def close(self) -> None:
        run, self._run = self._run, self._memory.take(0)
        self._memory.give_back(run)
        del run
        self._memory.trim()


class DiskRest:
    """A file without a name, written and read by way of two buffers in host memory::

        lane    copy chunk 0 | copy chunk 1 |              | copy chunk 2
        disk                 | write chunk 0               | write chunk 1 ...

    Args:
        rank: whose file it is, for errors.
    """

    def __init__(self, folder: Path, device: torch.device, rank: int) -> None:
        self.folder = folder
        self._file = PageFile(folder, rank=rank, argument="to")
        self._memory = HostMemory(pinned=device.type == "cuda", device=device)
        self._lanes = make_lanes(device)
        self._sizes: list[int] = []  # of the chunks
        self._extents: list[Extent] = []
        self._buffers: list[Tensor] = []

    def save(self, flats: Sequence[Tensor]) -> None:
        chunks = _chunks(flats)
        self._make_room([chunk.nbytes for chunk in chunks])
        lane, now = self._lanes.to_host, self._lanes.mark()
        now.set()
        lane.after(now)  # the device may still write ``flats``
        under_way: list[Transfer] = []
        for number, (chunk, extent) in enumerate(zip(chunks, self._extents, strict=True)):
            if number >= len(self._buffers):  # an earlier chunk is written from this buffer
                under_way[number - len(self._buffers)].wait(PATIENCE_SECONDS)
            buffer, copied = self._buffers[number % len(self._buffers)], self._lanes.mark()
            lane.copy(buffer[: chunk.nbytes], chunk)
            lane.set(copied)
            under_way.append(self._file.write(extent, buffer, copied.wait))
        for transfer in under_way:
            transfer.wait(PATIENCE_SECONDS)

    def _make_room(self, sizes: Sequence[int]) -> None:
        if sizes == self._sizes:
            return
        for extent in self._extents:
            self._file.release(extent)
        self._sizes, self._extents = [], []
        for buffer in self._buffers:
            self._memory.give_back(buffer)
        self._memory.trim()
        self._buffers = []
        self._extents = [self._file.allocate(nbytes) for nbytes in sizes]
        largest = max((extent.space for extent in self._extents), default=0)
        self._buffers = [self._memory.take(largest) for _ in range(2 if sizes else 0)]
        self._sizes = list(sizes)

    def load(self, flats: Sequence[Tensor]) -> None:
        lane, now = self._lanes.to_device, self._lanes.mark()
        now.set()
        lane.after(now)
        free = [self._lanes.mark() for _ in self._buffers]
        reads: list[Transfer] = []
        chunks = _chunks(flats)
        try:
            for number, chunk in enumerate(chunks):
                for ahead in range(len(reads), min(number + len(self._buffers), len(chunks))):
                    free[ahead % len(free)].wait()
                    reads.append(self._file.read(self._extents[ahead], self._buffers[ahead % len(free)]))
                reads[number].wait(PATIENCE_SECONDS)
                place = number % len(free)
                lane.copy(chunk, self._buffers[place][: chunk.nbytes])
                lane.set(free[place])
        finally:  # leave with no copy and no read under way, also after an error
            for mark in free:
                mark.wait()
            for transfer in reads:
                transfer.unfinished(PATIENCE_SECONDS)

    def footprint(self) -> Mapping[str, int]:
        return {"host": self._memory.in_use, "disk": self._file.nbytes}

    def close(self) -> None:
        self._file.close()


class Rests:
    """The rests of one optimizer.

    Args:
        device: of what is saved.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._on_host: HostRest | None = None
        self._on_disk: DiskRest | None = None

    def saved(self, flats: Sequence[Tensor], folder: Path | None) -> Rest:
        """Save ``flats`` in ``folder``; None: in host memory. Returns the rest. Raises OffloadError."""
        if folder is None:
            self._on_host = self._on_host or HostRest(self._device)
            self._on_host.save(flats)
            return self._on_host
        if self._on_disk is None or self._on_disk.folder != folder:
            self._forget_disk()
            self._on_disk = DiskRest(folder, self._device, self._rank)
        try:
            self._on_disk.save(flats)
        except BaseException:
            self._forget_disk()  # writes may be under way in it
            raise
        return self._on_disk

    def _forget_disk(self) -> None:
        disk, self._on_disk = self._on_disk, None
        if disk is not None:
            with suppress(OffloadError):  # the disk does not answer: another call says so, or has said it
                disk.close()

    def footprint(self) -> dict[str, int]:
        """Bytes kept, by memory: host, disk."""
        kept = [rest.footprint() for rest in (self._on_host, self._on_disk) if rest is not None]
        return {memory: sum(of[memory] for of in kept) for memory in ("host", "disk")}

    def close(self) -> None:
        """Give everything back."""
        if self._on_host is not None:
            self._on_host.close()
        self._forget_disk()


def _chunks(flats: Sequence[Tensor]) -> list[Tensor]:
    return list(itertools.chain.from_iterable(flat.split(CHUNK_BYTES) for flat in flats if flat.nbytes))
