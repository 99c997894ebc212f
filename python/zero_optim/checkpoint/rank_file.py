"""A rank's file of a checkpoint: flat pieces of tensors, with a checksum for each block.

Pieces are found by the index, which also has the checksum of each file's header. Before anything is loaded, the ranks
check the headers, each rank those of a part of the files.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zero_kernels import ROW

from ..errors import CheckpointError
from ..params.storage_order import slice_counts
from ..params.tensor_slice import WHOLE, Arrangement, read_arranged
from ..rules.codec import CODECS, Codec, Per, StateTensor
from .index import FlatRange, Index, Key, Piece, SavedTensor, crc32c
from .safetensors_file import BLOCK_BYTES, Entry, OpenFiles, write_entries


def fill(target: Tensor, dtype: torch.dtype, data: bytes, first: int) -> None:
    """Give ``target`` [length] the values of ``dtype`` in ``data``, from element ``first`` on."""
    begin, nbytes = first * dtype.itemsize, target.numel() * dtype.itemsize
    in_place = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    where = target if in_place else torch.empty(target.numel(), dtype=dtype, device="cpu")  # else a second buffer
    ctypes.memmove(where.data_ptr(), data[begin : begin + nbytes], nbytes)  # a slice of all is no copy
    if in_place:
        torch.autograd.graph.increment_version(target)  # torch has not seen the write
    else:
        target.copy_(where)  # casts, or copies to the device: the host waits, as the memory is not pinned


def write_file(path: Path, portions: Sequence[FlatRange], values: Iterable[Tensor]) -> tuple[str, list[SavedTensor]]:
    """Write a file of ``portions``, synced to the disk. Returns the checksum of its header, and what it holds.
    ``values``: see ``write_entries``. Raises CheckpointError where the system refuses, naming file and bytes."""
    entries = [Entry(f"{of.spec.kind}:{of.spec.name}:{of.start}", of.spec.dtype, (of.length,)) for of in portions]
    checksums: list[str] = []
    header, offsets = write_entries(path, entries, values, lambda block: checksums.append(crc32c(block)), {})
    left = iter(checksums)
    written = []
    for portion, offset in zip(portions, offsets, strict=True):
        own = list(itertools.islice(left, -(-portion.nbytes // BLOCK_BYTES)))
        written.append(SavedTensor(portion.spec, [Piece(path.name, portion.start, portion.length, offset, own)]))
    return crc32c(header), written


# -- reading -----------------------------------------------------------------------------------------------------------


def check_headers(folder: Path, index: Index, rank: int, ranks: int) -> None:
    """Raise CheckpointError where the header of a file is damaged. This rank checks every ``ranks``-th."""
    for name in sorted(index.files)[rank::ranks]:
        path = folder / name
        try:
            with path.open("rb") as file:
                length = file.read(8)
                header = length + file.read(min(int.from_bytes(length, "little"), index.files[name]))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        if crc32c(header) != index.headers.get(name):
            raise CheckpointError(f"{path} is damaged: its header has another checksum")


class Files(OpenFiles):
    """The files of a checkpoint's ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._prefix = f"{folder}/"  # to join paths for each block takes longer than to read it

    def damage(self, tensors: Iterable[SavedTensor], rank: int, ranks: int) -> Iterator[CheckpointError]:
        """Read and check a ``ranks``-th of these. Yields the error of each damaged block, naming file and tensor."""
        parts = [part for one in tensors for part in (one.stored if isinstance(one, EncodedTensor) else (one,))]
        pieces = [(piece, of) for of in {part.spec.key: part for part in parts}.values() for piece in of.pieces]
        # By the order in the files: much of this part the rank soon reads again.
        pieces.sort(key=lambda pair: (len(pair[0].file), pair[0].file, pair[0].offset))
        total = sum(piece.length * of.spec.dtype.itemsize for piece, of in pieces)
        low, high = -(-total * rank // ranks), -(-total * (rank + 1) // ranks)  # rounded alike: a block is of one rank
        begin = 0
        for piece, of in pieces:
            nbytes = piece.length * of.spec.dtype.itemsize
            for block in _blocks_of(of, piece.start, piece.end) if begin < high and begin + nbytes > low else ():
                if not low <= begin + block.offset - piece.offset < high:
                    continue
                try:
                    self.read_block(block)
                except CheckpointError as error:
                    yield error
            begin += nbytes

    def read_into(self, target: Tensor, tensor: SavedTensor, start: int, arranged: Arrangement = WHOLE) -> None:
        """Fill ``target`` [length], of any dtype and device, with the elements of ``tensor`` from ``start`` on, counted
        as ``arranged``. Every block that is read is checked. Raises CheckpointError, naming file and tensor."""
        ways = (arranged, tensor.spec.arrangement)
        if isinstance(tensor, EncodedTensor):
            read_arranged(target, start, tensor.spec.shape, ways, partial(self._read_encoded, tensor))
        else:
            read_arranged(target, start, tensor.spec.shape, ways, partial(self._read_as_saved, tensor))

    def _read_encoded(self, tensor: EncodedTensor, target: Tensor, start: int) -> None:
        state = StateTensor(tensor.spec.kind)
        for low, high, row in tensor.runs(start, start + target.numel()):
            flats = []
            for part, of in zip(tensor.stored, tensor.codec.parts(state), strict=True):
                first, length = (row, -(-(high - low) // ROW)) if of.per is Per.ROW else (low, high - low)
                flats.append(torch.empty(length, dtype=part.spec.dtype, device="cpu"))
                self._read_as_saved(part, flats[-1], first)
            values = tensor.codec.decode_flat(state, flats)
            first = max(start, low)
            target[first - start : high - start].copy_(values[first - low :])

    def _read_as_saved(self, tensor: SavedTensor, target: Tensor, start: int) -> None:
        length = target.numel()
        for block in _blocks_of(tensor, start, start + length):
            data = self.read_block(block)
            low, high = max(start, block.start), min(start + length, block.start + block.length)
            part = target if high - low == length else target[low - start : high - start]
            fill(part, tensor.spec.dtype, data, low - block.start)

    def read_block(self, block: ChecksumBlock) -> bytes:
        """Read a block's bytes, and check them. Raises CheckpointError, naming file and tensor."""
        path = self._prefix + block.file
        data = self.read(path, block.offset, block.nbytes, block.spec.label)
        if crc32c(data) != block.crc32c:
            bytes_of = f"bytes {block.offset:,} to {block.offset + block.nbytes:,}, of the {block.spec.label}"
            raise CheckpointError(f"{path} is damaged: {bytes_of}, have another checksum")
        return data


@dataclass(frozen=True)
class ChecksumBlock(FlatRange):
    """A flat range that has a checksum of its own, and where it is in a file."""

    file: str
    offset: int
    crc32c: str


def _blocks_of(tensor: SavedTensor, start: int, end: int) -> Iterator[ChecksumBlock]:
    """Cut out the blocks that hold elements from ``start`` to ``end``, in order."""
    most = BLOCK_BYTES // tensor.spec.dtype.itemsize
    for piece in tensor.pieces:
        if max(start, piece.start) >= min(end, piece.end):
            continue
        for number in range(max(start - piece.start, 0) // most, -(-min(end - piece.start, piece.length) // most)):
            first = piece.start + number * most
            length = min(most, piece.end - first)
            offset = piece.offset + number * BLOCK_BYTES
            yield ChecksumBlock(tensor.spec, first, length, piece.file, offset, piece.crc32c[number])


# -- state that was stored by a codec ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedTensor(SavedTensor):
    """The tensors ``stored`` by a codec, in its order, read as the logical fp32 tensor, whose ``spec`` this has.

    Rows are counted in each slice of a parameter from its first element on, as the elements lie in memory::

        exp_avg of a [3, 100], cut in two along dimension 1     slice 0: 150 elements, 2 rows     slice 1: 150, 2 rows
        exp_avg_int8     |<------ 150 ------>|<------ 150 ------>|
        exp_avg_scale    |  0  |  1          |  2  |  3          |
    """

    codec: Codec
    stored: Sequence[SavedTensor]

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Give the runs that hold the elements ``start`` to ``end``, one a slice, each from the beginning of a row on:
        first element, end, and number of the first row."""
        of_rows = next((part.spec.rows_of for part in self.stored if part.spec.rows_of is not None), None)
        begin, rows = 0, 0
        for count in of_rows or slice_counts(self.spec.shape, self.spec.cut):
            low, high = max(start, begin), min(end, begin + count)
            if low < high:
                first = (low - begin) // ROW
                yield begin + first * ROW, high, rows + first
            begin, rows = begin + count, rows + -(-count // ROW)


def decoded(index: Index) -> Index:
    """Put logical tensors in ``index`` in place of those that codecs have stored."""
    tensors: dict[Key, SavedTensor] = dict(index.tensors)
    for optimizer in index.optimizers:
        names = [name for group in optimizer.groups for name in group["params"]]
        for kind, codec_name in optimizer.codecs.items():
            codec = CODECS[codec_name]
            for name in names:
                keys = [(part.name, name) for part in codec.parts(StateTensor(kind))]
                if keys[0] in index.tensors:
                    parts = [index.tensors[key] for key in keys if key in index.tensors]
                    spec = replace(parts[0].spec, kind=kind, dtype=torch.float32)
                    tensors[kind, name] = EncodedTensor(spec, (), codec, parts)
                    for key in keys:
                        tensors.pop(key, None)
    return replace(index, tensors=tensors)
