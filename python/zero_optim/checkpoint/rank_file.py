"""A rank's file of a checkpoint: flat pieces of tensors, with a checksum for each block.

Pieces are found by the index, which also has the checksum of each file's header. Before anything is loaded, the ranks
check the headers, each rank those of a part of the files.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero_kernels import ROW

from ..errors import CheckpointError
from ..params.storage_order import slice_counts
from ..params.tensor_slice import WHOLE, Arrangement, read_arranged
from ..rules.codec import CODECS, Codec, Per, StateTensor
from .index import FlatRange, Index, Key, Piece, ReadRange, SavedTensor, TensorSpec
from .safetensors_file import BLOCK_BYTES, NAMES, RUN_BYTES, Entry, OpenFiles, will_read, write_entries


@dataclass(frozen=True)
class Portion(FlatRange):
    """The part of a tensor that a rank writes."""

    @property
    def key(self) -> str:
        """The name of the entry in the file."""
        return f"{self.spec.kind}:{self.spec.name}:{self.start}"


def crc32c(data: bytes) -> str:
    """Compute a checksum, in hexadecimal. Raises CheckpointError where the package for it is missing."""
    try:
        from google_crc32c import value
    except ImportError as error:
        raise CheckpointError(
            "checkpoints have checksums, for which google-crc32c is missing: pip install google-crc32c"
        ) from error
    return f"{value(data):08x}"


def check_dtype(spec: TensorSpec) -> None:
    """Raise CheckpointError for a dtype that safetensors has no name for."""
    if spec.dtype not in NAMES:
        raise CheckpointError(f"the {spec.label} has {spec.dtype}, which safetensors cannot hold")


def fill(target: Tensor, dtype: torch.dtype, data: bytes, first: int) -> None:
    """Give ``target`` [length] the values of ``dtype`` in ``data``, from element ``first`` on."""
    begin, nbytes = first * dtype.itemsize, target.numel() * dtype.itemsize
    if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        where = target  # the bytes as they are
    else:
        where = torch.empty(target.numel(), dtype=dtype, device="cpu")
    ctypes.memmove(where.data_ptr(), data[begin : begin + nbytes] if begin or nbytes < len(data) else data, nbytes)
    if where is target:
        torch.autograd.graph.increment_version(target)  # torch has not seen the write
    else:
        target.copy_(where)


def write_file(path: Path, portions: Sequence[Portion], values: Iterable[Tensor]) -> tuple[str, list[SavedTensor]]:
    """Write a file of ``portions``, synced to the disk. Returns the checksum of its header, and what it holds.

    Args:
        values: of each portion [length], in the same order; each is written before the next is asked for.

    Raises CheckpointError where the system refuses, naming file and bytes.
    """
    entries = [Entry(portion.key, portion.spec.dtype, (portion.length,)) for portion in portions]
    checksums: list[str] = []
    header, offsets = write_entries(path, entries, values, lambda block: checksums.append(crc32c(block)))
    written, first = [], 0
    for portion, offset in zip(portions, offsets, strict=True):
        own = checksums[first : (first := first - (-portion.nbytes // BLOCK_BYTES))]
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
        self.folder = folder
        self._prefix = f"{folder}/"  # to join paths for each block takes longer than to read it
        self._ahead: dict[int, int] = {}  # of open files, where the range ends that the disk is reading ahead

    def verify(self, tensors: Iterable[SavedTensor], rank: int, ranks: int) -> None:
        """Read and check a ``ranks``-th of these, by the order in the files: much of it this rank soon reads again.

        Raises CheckpointError, naming file and tensor.
        """
        parts = [part for tensor in tensors for part, _, _ in tensor.ranges(0, tensor.spec.numel)]
        for block in blocks_of_rank([*{part.spec.key: part for part in parts}.values()], rank, ranks):
            self.read_block(block)

    def read_into(self, target: Tensor, tensor: SavedTensor, start: int, arranged: Arrangement = WHOLE) -> None:
        """Fill ``target`` [length], of any dtype and device, with the elements of ``tensor`` from ``start`` on.

        They are counted as ``arranged``, however they were saved.

        Every block that is read is checked. Raises CheckpointError, naming file and tensor.
        """
        ways = (arranged, tensor.spec.arrangement)
        read_arranged(target, start, tensor.spec.shape, ways, partial(tensor.read, read=self._read_as_saved))

    def _read_as_saved(self, tensor: SavedTensor, target: Tensor, start: int) -> None:
        length = target.numel()
        for block in _blocks_of(tensor, start, start + length):
            data = self.read_block(block)
            low, high = max(start, block.start), min(start + length, block.start + block.length)
            part = target if high - low == length else target[low - start : high - start]
            fill(part, tensor.spec.dtype, data, low - block.start)

    def read_block(self, block: ChecksumBlock) -> bytes:
        """Read a block's bytes, and check them."""
        name, nbytes, offset = block.piece.file, block.nbytes, block.offset
        try:
            file = self.descriptor(self._prefix + name)
            self._read_ahead(file, offset)
            data = os.pread(file, nbytes, offset)
        except OSError as error:
            path = self.folder / name
            raise CheckpointError(f"{path}, which holds the {block.spec.label}: {error.strerror}") from error
        if len(data) < nbytes:
            raise CheckpointError(f"{self.folder / name} ends in the midst of the {block.spec.label}: it was cut off")
        if crc32c(data) != block.crc32c:
            bytes_of = f"bytes {offset:,} to {offset + nbytes:,}, of the {block.spec.label}"
            raise CheckpointError(f"{self.folder / name} is damaged: {bytes_of}, have another checksum")
        return data

    def _read_ahead(self, file: int, offset: int) -> None:
        """Keep the disk reading between a half and all of ``RUN_BYTES`` ahead of ``offset``."""
        ahead = self._ahead.get(file, 0)
        begin = ahead if offset <= ahead <= offset + RUN_BYTES else offset
        if begin - offset <= RUN_BYTES // 2:
            self._ahead[file] = offset + RUN_BYTES
            will_read(file, begin, self._ahead[file] - begin)


class ChecksumBlock(NamedTuple):
    """A part of a piece with a checksum of its own, the piece's ``number``-th: ``length`` elements of the tensor from
    ``start`` on."""

    spec: TensorSpec
    start: int
    length: int
    piece: Piece
    number: int

    @property
    def nbytes(self) -> int:
        return self.length * self.spec.dtype.itemsize

    @property
    def offset(self) -> int:
        return self.piece.offset + self.number * BLOCK_BYTES

    @property
    def crc32c(self) -> str:
        return self.piece.crc32c[self.number]


def blocks_of_rank(tensors: Sequence[SavedTensor], rank: int, ranks: int) -> Iterator[ChecksumBlock]:
    """Choose the blocks of ``tensors`` that begin in the ``rank``-th part of their bytes, in the order of files."""
    pieces = [(piece, tensor) for tensor in tensors for piece in tensor.pieces]
    pieces.sort(key=lambda pair: (len(pair[0].file), pair[0].file, pair[0].offset))
    total = sum(piece.length * tensor.spec.dtype.itemsize for piece, tensor in pieces)
    low, high = -(-total * rank // ranks), -(-total * (rank + 1) // ranks)
    begin = 0
    for piece, tensor in pieces:
        nbytes = piece.length * tensor.spec.dtype.itemsize
        for block in _blocks_of(tensor, piece.start, piece.end) if begin < high and begin + nbytes > low else ():
            if low <= begin + block.number * BLOCK_BYTES < high:
                yield block
        begin += nbytes


def _blocks_of(tensor: SavedTensor, start: int, end: int) -> Iterator[ChecksumBlock]:
    """Cut out the blocks that hold elements from ``start`` to ``end``, in order."""
    most = BLOCK_BYTES // tensor.spec.dtype.itemsize
    for piece in tensor.pieces:
        begin, length = piece.start, piece.length
        if max(start, begin) >= min(end, begin + length):
            continue
        if length <= most:  # as of most tensors of a large model
            yield ChecksumBlock(tensor.spec, begin, length, piece, 0)
            continue
        for number in range(max(start - begin, 0) // most, -(-min(end - begin, length) // most)):
            yield ChecksumBlock(tensor.spec, begin + number * most, min(most, length - number * most), piece, number)


# -- state that was stored by a codec ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedTensor(SavedTensor):
    """A tensor that was stored by a codec, read as the logical fp32 tensor, whose ``spec`` it has.

    Rows are counted in each slice of a parameter from its first element on, as the elements lie in memory::

        exp_avg of a [3, 100], cut in two along dimension 1     slice 0: 150 elements, 2 rows     slice 1: 150, 2 rows
        exp_avg_int8     |<------ 150 ------>|<------ 150 ------>|
        exp_avg_scale    |  0  |  1          |  2  |  3          |

    Attributes:
        codec: the codec.
        stored: the tensors that were saved, as the codec lists them.
    """

    codec: Codec
    stored: Sequence[SavedTensor]

    def ranges(self, start: int, length: int) -> Iterator[tuple[SavedTensor, int, int]]:
        for low, high, row in self._runs(start, start + length):
            yield from self._of_run(low, high, row)

    def read(self, target: Tensor, start: int, read: ReadRange) -> None:
        for low, high, row in self._runs(start, start + target.numel()):
            flats = []
            for part, first, length in self._of_run(low, high, row):
                flats.append(torch.empty(length, dtype=part.spec.dtype, device="cpu"))
                there = part.spec.arrangement
                read_arranged(flats[-1], first, part.spec.shape, (there, there), partial(read, part))
            values = self.codec.decode_flat(self._tensor, flats)
            first = max(start, low)
            target[first - start : high - start].copy_(values[first - low :])

    def _of_run(self, low: int, high: int, row: int) -> Iterator[tuple[SavedTensor, int, int]]:
        """Give what to read of each stored tensor for a run, whose first row is number ``row``."""
        for part, of in zip(self.stored, self.codec.parts(self._tensor), strict=True):
            yield part, *((row, -(-(high - low) // ROW)) if of.per is Per.ROW else (low, high - low))

    @property
    def _tensor(self) -> StateTensor:
        return StateTensor(self.spec.kind)

    def _runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Give the runs that hold the elements ``start`` to ``end``, one a slice, each from the beginning of a row on:
        first element, end, and number of the first row."""
        begin, rows = 0, 0
        for count in self._slices():
            low, high = max(start, begin), min(end, begin + count)
            if low < high:
                first = (low - begin) // ROW
                yield begin + first * ROW, high, rows + first
            begin, rows = begin + count, rows + -(-count // ROW)

    def _slices(self) -> Sequence[int]:
        """Elements of each slice."""
        of_rows = next((part.spec.rows_of for part in self.stored if part.spec.rows_of is not None), None)
        return of_rows or slice_counts(self.spec.shape, self.spec.cut)


def codec_of(saved: SavedTensor) -> Codec | None:
    """Give the codec that ``saved`` was stored by; None: it holds the values themselves."""
    return saved.codec if isinstance(saved, EncodedTensor) else None


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
