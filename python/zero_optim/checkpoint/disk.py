"""What the system is told so that the disk works while the processor counts checksums, where it can be told."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

RUN_BYTES = 32 * 2**20
"""So much is written, or read ahead, at a time."""
_SYNC_FILE_RANGE_WRITE = 2


def start_writing(file: int, offset: int, nbytes: int) -> None:
    """Let the disk begin with what was written there. Else it waits for ``fsync``, or for memory to run short."""
    sync_file_range = _sync_file_range()
    if sync_file_range is not None:
        sync_file_range(file, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def will_read(file: int, offset: int, nbytes: int) -> None:
    """Let the disk bring what will be read soon."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_WILLNEED)


@functools.cache
def _sync_file_range() -> Any:
    """Linux alone has it."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
