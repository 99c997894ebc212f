"""A file of the ``safetensors`` format, written and read piecemeal.

The format is 8 bytes with the length of the header, the header in JSON, the values. The ``safetensors`` package writes
only with every tensor in host memory at once, and cuts along the first dimension alone as it reads. Here a tensor is
written piece by piece, and any flat range of one is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.streams import on_device
from ..errors import CheckpointError

BLOCK_BYTES = 2**20  # read or written at a time, and the unit of checksums
RUN_BYTES = 32 * 2**20  # the disk is made to write, or to read ahead, so much at a time
_SYNC_FILE_RANGE_WRITE = 2
_STAGED_BYTES = 16 * 2**20  # of a GPU's tensor, copied to host memory while as many are written
_MOST_HEADER = 2**30

NAMES = {
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
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, by its name there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# -- writing -----------------------------------------------------------------------------------------------------------


def write_entries(
    path: Path,
    entries: Sequence[Entry],
    values: Iterable[Tensor],
    see: Callable[[bytes], None],
    metadata: Mapping[str, str],
) -> tuple[bytes, list[int]]:
    """Write a new file, synced to the disk. Returns its header, and where each entry's values begin, in bytes.

    ``values``: of each entry, flat, in the same order; each is written before the next is asked for. ``see``: called
    with every block, of ``BLOCK_BYTES`` but for the last of an entry. ``metadata``: for the header. Raises
    CheckpointError where the system refuses.
    """
    header, offsets = _layout(entries, metadata)
    total = len(header) + sum(entry.nbytes for entry in entries)
    done = 0
    try:
        with path.open("xb", buffering=0) as opened:
            file = opened.fileno()
            done += _write(file, header, 0)
            begun = 0  # bytes that the disk was made to begin with
            for offset, flat in zip(offsets, values, strict=True):
                for block in _blocks(flat):
                    see(block)
                    done += _write(file, block, offset)
                    offset += len(block)
                    if done - begun > RUN_BYTES:
                        _start_writing(file)  # the disk works meanwhile, and ``fsync`` has less to wait for
                        begun = done
            os.fsync(file)  # an index may name the file only when all of it is on the disk
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror} after {done:,} of {total:,} bytes") from error
    return header, offsets


def _layout(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Make the file's beginning, up to the values. Returns also where the values of each entry begin."""
    # Entries with larger elements come first, so that all are aligned.
    order = sorted(range(len(entries)), key=lambda place: -entries[place].dtype.itemsize)
    starts, end = [0] * len(entries), 0
    described: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    for place in order:
        entry = entries[place]
        starts[place] = begin = end
        end += entry.nbytes
        described[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def _write(file: int, data: bytes, offset: int) -> int:
    """Write all of ``data``. Returns its length."""
    done = 0
    while done < len(data):
        count = os.pwrite(file, data[done:] if done else data, offset + done)  # a full disk may cut it short
        if count == 0:  # else this would never end
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count
    return done


def _start_writing(file: int) -> None:
    """Make the disk begin to write what the file has, where the system is Linux."""
    sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if sync_file_range is not None:
        everything = ctypes.c_int64(0), ctypes.c_int64(0)  # entries need not come in the file's order
        sync_file_range(file, *everything, _SYNC_FILE_RANGE_WRITE)


def _blocks(flat: Tensor) -> Iterator[bytes]:
    for part in _on_host(flat):
        for start in range(0, part.nbytes, BLOCK_BYTES):
            yield ctypes.string_at(part.data_ptr() + start, min(BLOCK_BYTES, part.nbytes - start))


def _on_host(flat: Tensor) -> Iterator[Tensor]:
    """Give ``flat`` part by part; a GPU's next part is copied while one is in use."""
    if flat.device.type != "cuda":
        yield flat.cpu()
        return
    parts = flat.detach().view(torch.uint8).split(_STAGED_BYTES)
    # Pinned, as the host would wait for a copy to other memory. Two, as one is written while the other is filled.
    staging = [torch.empty(parts[0].numel(), dtype=torch.uint8, device="cpu", pin_memory=True) for _ in parts[:2]]
    copied = [torch.cuda.Event() for _ in staging]
    for place in range(len(parts) + 1):
        if place < len(parts):
            staging[place % 2][: parts[place].numel()].copy_(parts[place], non_blocking=True)
            copied[place % 2].record(torch.cuda.current_stream(flat.device))
        if place > 0:
            with on_device(flat.device):
                copied[(place - 1) % 2].synchronize()  # the next part's copy stays in flight
            yield staging[(place - 1) % 2][: parts[place - 1].numel()]


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored(Entry):
    """An entry of a file at ``path``. Its values begin at byte ``offset``."""

    path: Path
    offset: int


def read_header(path: Path) -> dict[str, Stored]:
    """Read a file's entries, by name. Raises CheckpointError for one that is damaged, or of another format."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise CheckpointError(f"{path} is no safetensors file, or was cut off")
            described: dict[str, Any] = json.loads(file.read(length))
        described.pop("__metadata__", None)
        stored = {}
        for name, of in described.items():
            begin, end = of["data_offsets"]
            stored[name] = Stored(name, _DTYPES[of["dtype"]], tuple(of["shape"]), path, 8 + length + begin)
            if begin < 0 or end - begin != stored[name].nbytes or 8 + length + end > size:
                raise CheckpointError(f"{path} was cut off, or is damaged: {name!r} is not in it")
        return stored
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or is damaged: {error}") from error


class OpenFiles(contextlib.ExitStack):
    """Files to be read, each opened when it is needed. As a context it closes them."""

    def __init__(self) -> None:
        super().__init__()
        self._descriptors: dict[str, int] = {}
        self._ahead: dict[int, int] = {}  # of open files, where the range ends that the disk is reading ahead

    def read(self, path: str, offset: int, nbytes: int, label: str) -> bytes:
        """Read bytes of the tensor ``label``. Raises CheckpointError, naming file and tensor."""
        try:
            if (file := self._descriptors.get(path)) is None:
                file = self._descriptors[path] = os.open(path, os.O_RDONLY)
                self.callback(os.close, file)
            # The disk reads between a half and all of ``RUN_BYTES`` ahead while the processor computes checksums.
            ahead = self._ahead.get(file, 0)
            begin = ahead if offset <= ahead <= offset + RUN_BYTES else offset
            if begin - offset <= RUN_BYTES // 2:
                self._ahead[file] = offset + RUN_BYTES
                if hasattr(os, "posix_fadvise"):
                    with contextlib.suppress(OSError):
                        os.posix_fadvise(file, begin, offset + RUN_BYTES - begin, os.POSIX_FADV_WILLNEED)
            data = os.pread(file, nbytes, offset)
        except OSError as error:
            raise CheckpointError(f"{path}, which holds the {label}: {error.strerror}") from error
        if len(data) < nbytes:
            raise CheckpointError(f"{path} ends in the midst of the {label}: it was cut off")
        return data
