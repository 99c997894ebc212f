"""A rank's file of a checkpoint: safetensors, of flat pieces, written and read a block at a time.

The format is that of ``safetensors``: 8 bytes with the length of the header, the header in JSON, the values. It is
written here, since the package's own writer wants every tensor in host memory at once. It is read by the places in the
index: no rank looks into the header of another's file.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..errors import CheckpointError
from .index import BLOCK_BYTES, Piece, SavedTensor, TensorSpec

_STAGED_BYTES = 16 * 2**20
"""Of values that are not in host memory, so many are brought there at a time; as many again meanwhile."""

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class Portion:
    """What a rank writes of a tensor: the flat range of ``length`` elements from ``start`` on."""

    spec: TensorSpec
    start: int
    length: int

    @property
    def nbytes(self) -> int:
        return self.length * self.spec.dtype.itemsize


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
    if spec.dtype not in _SAFETENSORS_NAMES:
        raise CheckpointError(f"the {spec.label} has {spec.dtype}, which safetensors cannot hold")


# -- writing -----------------------------------------------------------------------------------------------------------


def write_file(path: Path, portions: Sequence[Portion], values: Iterable[Tensor]) -> list[SavedTensor]:
    """Write a file of ``portions``, synced to the disk. Returns what the index is to hold of it.

    Args:
        values: of each portion [length], in the same order; each is read before the next is asked for.

    Raises CheckpointError where the system refuses, naming file and bytes.
    """
    header, offsets = _layout(portions)
    total = len(header) + sum(portion.nbytes for portion in portions)
    written: list[SavedTensor] = []
    done = 0
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            done += _write(file, header, 0)
            for portion, offset, flat in zip(portions, offsets, values, strict=True):
                checksums = []
                for block in _blocks_on_host(flat):
                    checksums.append(crc32c(block))
                    done += _write(file, block, offset + len(checksums) * BLOCK_BYTES - BLOCK_BYTES)
                piece = Piece(path.name, portion.start, portion.length, offset, tuple(checksums))
                written.append(SavedTensor(portion.spec, (piece,)))
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror} after {done:,} of {total:,} bytes") from error
    return written


def _layout(portions: Sequence[Portion]) -> tuple[bytes, list[int]]:
    """The file's beginning, up to the values, and where the values of each portion are.

    Those of larger elements come first, so that all are aligned.
    """
    order = sorted(range(len(portions)), key=lambda place: -portions[place].spec.dtype.itemsize)
    starts, end = [0] * len(portions), 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for place in order:
        portion = portions[place]
        starts[place], end = end, end + portion.nbytes
        entries[f"{portion.spec.kind}:{portion.spec.name}:{portion.start}"] = {
            "dtype": _SAFETENSORS_NAMES[portion.spec.dtype],
            "shape": [portion.length],
            "data_offsets": [starts[place], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def _write(file: int, data: bytes, offset: int) -> int:
    """Returns the bytes written, which is all."""
    done = 0
    while done < len(data):
        count = os.pwrite(file, data[done:] if done else data, offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count
    return done


def _blocks_on_host(flat: Tensor) -> Iterator[bytes]:
    for part in _on_host(flat.detach().view(torch.uint8)):
        for start in range(0, part.numel(), BLOCK_BYTES):
            yield ctypes.string_at(part.data_ptr() + start, min(BLOCK_BYTES, part.numel() - start))


def _on_host(flat: Tensor) -> Iterator[Tensor]:
    """``flat`` [bytes], a part after another; from a device the next is on its way meanwhile."""
    if flat.device.type != "cuda":
        yield flat.cpu()
        return
    parts = flat.split(_STAGED_BYTES)
    staging = [torch.empty(parts[0].numel(), dtype=torch.uint8, pin_memory=True) for _ in parts[:2]]
    copied = [torch.cuda.Event() for _ in staging]

    def bring(place: int) -> None:
        staging[place % 2][: parts[place].numel()].copy_(parts[place], non_blocking=True)
        copied[place % 2].record()

    bring(0)
    for place, part in enumerate(parts):
        if place + 1 < len(parts):
            bring(place + 1)
        copied[place % 2].synchronize()
        yield staging[place % 2][: part.numel()]


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
