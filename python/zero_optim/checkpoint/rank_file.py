"""A rank's file of a checkpoint: flat pieces of tensors, with a checksum for each block.

Pieces are found by the index. Each file's header repeats what the index says of it: before anything is loaded, the
ranks compare the two, each rank for a part of the files.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..params.arrangement import WHOLE, Arrangement, read_arranged
from . import disk
from .index import FlatRange, Index, Piece, SavedTensor, TensorSpec
from .safetensors_file import BLOCK_BYTES, NAMES, Entry, read_header, write_entries

_TENSORS = "tensors"
"""In the metadata of a file: shape and order of the tensors that its entries are pieces of, as JSON."""


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


def write_file(path: Path, portions: Sequence[Portion], values: Iterable[Tensor]) -> list[SavedTensor]:
    """Write a file of ``portions``, synced to the disk. Returns what the index is to hold of it.

    Args:
        values: of each portion [length], in the same order; each is written before the next is asked for.

    Raises CheckpointError where the system refuses, naming file and bytes.
    """
    entries = [Entry(portion.key, portion.spec.dtype, (portion.length,)) for portion in portions]
    checksums: list[str] = []
    described = json.dumps({portion.key: _described(portion.spec) for portion in portions}, separators=(",", ":"))
    see = lambda block: checksums.append(crc32c(block))  # noqa: E731
    offsets = write_entries(path, entries, values, see, {_TENSORS: described})
    each = iter(checksums)
    written = []
    for portion, offset in zip(portions, offsets, strict=True):
        own = tuple(next(each) for _ in range(-(-portion.nbytes // BLOCK_BYTES)))
        written.append(SavedTensor(portion.spec, (Piece(path.name, portion.start, portion.length, offset, own),)))
    return written


# -- reading -----------------------------------------------------------------------------------------------------------


def check_headers(folder: Path, index: Index, rank: int, ranks: int) -> None:
    """Raise CheckpointError where a file does not hold what the index says. This rank checks every ``ranks``-th."""
    mine = sorted(index.files)[rank::ranks]
    expected: dict[str, dict[str, tuple[TensorSpec, Piece]]] = {name: {} for name in mine}
    for tensor in index.tensors.values():
        for piece in tensor.pieces:
            if piece.file in expected:
                expected[piece.file][Portion(tensor.spec, piece.start, piece.length).key] = (tensor.spec, piece)
    for name in mine:
        _check_header(folder / name, expected[name])


def _check_header(path: Path, expected: Mapping[str, tuple[TensorSpec, Piece]]) -> None:
    stored, metadata = read_header(path)
    if stored.keys() != expected.keys():
        odd = min(stored.keys() ^ expected.keys())
        raise CheckpointError(f"{path} and the index differ: {odd!r} is in {'it' if odd in stored else 'that'} alone")
    try:
        described = dict(json.loads(metadata[_TENSORS])) if _TENSORS in metadata else {}  # of earlier versions
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read: {error}") from error
    for key, (spec, piece) in expected.items():
        there = stored[key]
        same = (there.entry.dtype, there.entry.shape, there.offset) == (spec.dtype, (piece.length,), piece.offset)
        if not same or (described and described.get(key) != _described(spec)):
            raise CheckpointError(f"{path} and the index differ on the {spec.label}: on its dtype, shape or place")


def _described(spec: TensorSpec) -> list[Any]:
    """Describe the whole tensor of a piece, beside its entry: shape and arrangement."""
    cut = [] if spec.cut is None else [[spec.cut.dim, list(spec.cut.sizes)]]
    return [list(spec.shape), None if spec.order is None else list(spec.order), *cut]


class Files(disk.OpenFiles):
    """The files of a checkpoint's ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._paths: dict[str, Path] = {}  # of files by name: to join them for each block takes longer than to read it
        self._coming: Iterator[ChecksumBlock] = iter(())
        self._ahead = 0  # bytes announced to the disk, and not read yet

    def verify(self, tensors: Iterable[SavedTensor], rank: int, ranks: int) -> None:
        """Read and check a ``ranks``-th of these, by the order in the files: much of it this rank soon reads again.

        Raises CheckpointError, naming file and tensor.
        """
        parts = [part for tensor in tensors for part, _, _ in tensor.ranges(0, tensor.spec.numel)]
        mine = partial(_blocks_of_rank, list({part.spec.key: part for part in parts}.values()), rank, ranks)
        self._coming, self._ahead = mine(), 0
        for block in mine():
            self.read_block(block)

    def expect(self, ranges: Iterable[tuple[SavedTensor, int, int]]) -> None:
        """Announce what will be read, in this order: ranges as tensor, first element, length.

        While a block is read, the disk is told of the next ones, ``RUN_BYTES`` ahead.
        """
        self._coming = (
            block
            for tensor, start, length in ranges
            for part, first, count in tensor.ranges(start, length)
            for block in _blocks_of(part, first, first + count)
        )
        self._ahead = 0

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
        path = self._path_of(block)
        self._read_ahead(block.nbytes)
        try:
            data = os.pread(self.descriptor(path), block.nbytes, block.offset)
        except OSError as error:
            raise self._refusal(block, error) from error
        if len(data) < block.nbytes:
            raise CheckpointError(f"{path} ends in the midst of the {block.spec.label}: it was cut off")
        if crc32c(data) != block.crc32c:
            bytes_of = f"bytes {block.offset:,} to {block.offset + block.nbytes:,}, of the {block.spec.label}"
            raise CheckpointError(f"{path} is damaged: {bytes_of}, have another checksum")
        return data

    def _path_of(self, block: ChecksumBlock) -> Path:
        name = block.piece.file
        if name not in self._paths:
            self._paths[name] = self.folder / name
        return self._paths[name]

    def _refusal(self, block: ChecksumBlock, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path_of(block)}, which holds the {block.spec.label}: {error.strerror}")

    def _read_ahead(self, nbytes: int) -> None:
        """Announce further blocks to the disk, in place of ``nbytes`` that are going to be read now."""
        self._ahead = max(self._ahead - nbytes, 0)
        while self._ahead < disk.RUN_BYTES and (block := next(self._coming, None)) is not None:
            try:
                disk.will_read(self.descriptor(self._path_of(block)), block.offset, block.nbytes)
            except OSError as error:
                raise self._refusal(block, error) from error
            self._ahead += block.nbytes


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


def _blocks_of_rank(tensors: Sequence[SavedTensor], rank: int, ranks: int) -> Iterator[ChecksumBlock]:
    """Choose the blocks of ``tensors`` that begin in the ``rank``-th part of their bytes, in the order of files."""
    pieces = [(piece, tensor) for tensor in tensors for piece in tensor.pieces]
    pieces.sort(key=lambda pair: (len(pair[0].file), pair[0].file, pair[0].offset))
    total = sum(piece.length * tensor.spec.dtype.itemsize for piece, tensor in pieces)
    low, high = -(-total * rank // ranks), -(-total * (rank + 1) // ranks)
    begin = 0
    for piece, tensor in pieces:
        nbytes = piece.length * tensor.spec.dtype.itemsize
        for block in blocks_in(tensor, piece) if begin < high and begin + nbytes > low else ():
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


def blocks_in(tensor: SavedTensor, piece: Piece) -> Iterator[ChecksumBlock]:
    """Give all blocks of a piece."""
    return _blocks_of(tensor, piece.start, piece.end)
