"""A rank's file of a checkpoint: flat pieces of tensors, with a checksum for each block.

It is read by the places in the index: no rank looks into the header of another's file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..errors import CheckpointError
from .index import Piece, SavedTensor, TensorSpec
from .safetensors_file import BLOCK_BYTES, NAMES, Entry, write_entries


@dataclass(frozen=True)
class Portion:
    """What a rank writes of a tensor: the flat range of ``length`` elements from ``start`` on."""

    spec: TensorSpec
    start: int
    length: int

    @property
    def nbytes(self) -> int:
        return self.length * self.spec.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.spec.kind}:{self.spec.name}:{self.start}"


def crc32c(data: bytes) -> str:
    """In hexadecimal. Raises CheckpointError where the package for it is missing."""
    try:
        from google_crc32c import value
    except ImportError as error:
        raise CheckpointError(
            "checkpoints have checksums, for which google-crc32c is missing: pip install zero-kernels[checkpoint]"
        ) from error
    return f"{value(data):08x}"


def check_dtype(spec: TensorSpec) -> None:
    """Raise CheckpointError for a dtype that safetensors has no name for."""
    if spec.dtype not in NAMES:
        raise CheckpointError(f"the {spec.label} has {spec.dtype}, which safetensors cannot hold")


def write_file(path: Path, portions: Sequence[Portion], values: Iterable[Tensor]) -> list[SavedTensor]:
    """Write a file of ``portions``, synced to the disk. Returns what the index is to hold of it.

    Args:
        values: of each portion [length], in the same order; each is read before the next is asked for.

    Raises CheckpointError where the system refuses, naming file and bytes.
    """
    entries = [Entry(portion.key, portion.spec.dtype, (portion.length,)) for portion in portions]
    checksums: list[str] = []
    offsets = write_entries(path, entries, values, lambda block: checksums.append(crc32c(block)))
    each = iter(checksums)
    written = []
    for portion, offset in zip(portions, offsets, strict=True):
        own = tuple(next(each) for _ in range(-(-portion.nbytes // BLOCK_BYTES)))
        written.append(SavedTensor(portion.spec, (Piece(path.name, portion.start, portion.length, offset, own),)))
    return written


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Files:
    """The files of a checkpoint's ``folder``, opened as they are needed. A context: it closes them.

    ``nbytes``: read so far.
    """

    folder: Path
    nbytes: int = 0
    _open: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def read_into(self, target: Tensor, tensor: SavedTensor, start: int) -> None:
        """Fill ``target`` [length], of any dtype and device, with the elements of ``tensor`` from ``start`` on.

        Every block that is read is checked. Raises CheckpointError, naming file and tensor.
        """
        end = start + target.numel()
        for piece in tensor.pieces:
            low, high = max(start, piece.start), min(end, piece.end)
            if low < high:
                self._read_piece(target[low - start : high - start], tensor, piece, low - piece.start)

    def _read_piece(self, target: Tensor, tensor: SavedTensor, piece: Piece, first: int) -> None:
        """``first``: the element of the piece that ``target`` begins with."""
        a_block = BLOCK_BYTES // tensor.spec.dtype.itemsize
        last = first + target.numel()
        staging = torch.empty(min(a_block, piece.length), dtype=tensor.spec.dtype, device="cpu")
        for number in range(first // a_block, -(-last // a_block)):
            length = min(a_block, piece.length - number * a_block)
            data = self.read_block(tensor, piece, number)
            ctypes.memmove(staging.data_ptr(), data, len(data))
            low, high = max(first, number * a_block), min(last, number * a_block + length)
            source = staging[low - number * a_block : high - number * a_block]
            target[low - first : high - first].copy_(source)

    def read_block(self, tensor: SavedTensor, piece: Piece, number: int) -> bytes:
        """The bytes of a block of a piece, checked."""
        begin = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, piece.length * tensor.spec.dtype.itemsize - begin)
        path = self.folder / piece.file
        try:
            if piece.file not in self._open:
                self._open[piece.file] = os.open(path, os.O_RDONLY)
            data = os.pread(self._open[piece.file], length, piece.offset + begin)
        except OSError as error:
            raise CheckpointError(f"{path}, which holds the {tensor.spec.label}: {error.strerror}") from error
        self.nbytes += len(data)
        if len(data) < length:
            raise CheckpointError(f"{path} ends in the midst of the {tensor.spec.label}: it was cut off")
        if crc32c(data) != piece.crc32c[number]:
            place = piece.offset + begin
            raise CheckpointError(
                f"{path} is damaged: bytes {place:,} to {place + length:,}, of the {tensor.spec.label}, have another "
                "checksum"
            )
        return data
