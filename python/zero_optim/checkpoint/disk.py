"""Calls of the system, made where it has them. With these the disk works while the processor computes checksums, and
two folders exchange their names at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from pathlib import Path
from typing import Any

RUN_BYTES = 32 * 2**20
"""Bytes that are written, or read ahead, at a time."""
_SYNC_FILE_RANGE_WRITE = 2
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


class OpenFiles(contextlib.ExitStack):
    """Files to be read, each opened when it is needed. As a context it closes them."""

    def __init__(self) -> None:
        super().__init__()
        self._descriptors: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        """Open the file, if it is not open. Raises OSError."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
            self.callback(os.close, self._descriptors[path])
        return self._descriptors[path]


def start_writing(file: int, offset: int, nbytes: int) -> None:
    """Make the disk begin to write this range, in place of waiting for ``fsync`` or for memory to run short."""
    sync_file_range = _call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if sync_file_range is not None:
        sync_file_range(file, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def will_read(file: int, offset: int, nbytes: int) -> None:
    """Make the disk read this range ahead."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_WILLNEED)


def exchange(one: Path, other: Path) -> bool:
    """Give each of two folders the name of the other, in one call: at no time is a name without its folder.

    Returns False, with nothing done, where the system or this file system cannot. Raises OSError.
    """
    renameat2 = _call("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2 is None:
        return False
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if renameat2(*names, _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@functools.cache
def _call(name: str, *arguments: Any) -> Any:
    """Find a function of the C library, and set its argument types. None where there is none of that name.

    Linux alone has those that are called here, ``renameat2`` in C libraries from 2018 on.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = arguments
    return function
