"""Calls that make the disk work while the processor computes checksums, made where the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

RUN_BYTES = 32 * 2**20
"""Bytes that are written, or read ahead, at a time."""
_SYNC_FILE_RANGE_WRITE = 2


class OpenFiles(contextlib.ExitStack):
    """Files to be read, each opened when it is needed. As a context it closes them."""

    def __init__(self) -> None:
        super().__init__()
        self._descriptors: dict[str | Path, int] = {}

    def descriptor(self, path: str | Path) -> int:
        """Open the file, if it is not open. Raises OSError."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
            self.callback(os.close, self._descriptors[path])
        return self._descriptors[path]


def start_writing(file: int, offset: int, nbytes: int) -> None:
    """Make the disk begin to write this range, in place of waiting for ``fsync`` or for memory to run short."""
    if (sync_file_range := _sync_file_range()) is not None:
        sync_file_range(file, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def will_read(file: int, offset: int, nbytes: int) -> None:
    """Make the disk read this range ahead."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_WILLNEED)


@functools.cache
def _sync_file_range() -> Any:
    """Find the function of Linux's C library. None on other systems."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
