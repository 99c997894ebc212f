"""Where tests keep what they compile: in a folder of the user's, which all checkouts share.

A folder's or a file's name says what it is made of, so that another branch, or another compiler, never finds the wrong
one. Those that nobody has asked for longest are removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MOST = 8  # of one kind: as many branches go on side by side


def folder(name: str) -> Path:
    """``~/.cache/zero-kernels/NAME``, or in ``XDG_CACHE_HOME``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zero-kernels", name)


@contextmanager
def one_at_a_time(cache: Path) -> Iterator[None]:
    """Processes wait here for the one that builds. The system opens the lock when its holder dies.

    Makes the folder where it is not there.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def used(path: Path) -> None:
    """Somebody has asked for this entry, and holds the lock. The others may be too many now."""
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    entries = [entry for entry in path.parent.iterdir() if entry.name != "lock"]
    for old in sorted(entries, key=lambda entry: entry.stat().st_mtime)[:-MOST]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def version(compiler: Sequence[str]) -> str:
    """What a compiler says of itself; empty where it is not there."""
    if shutil.which(compiler[0]) is None:
        return ""
    return subprocess.run([compiler[0], "--version"], stdout=subprocess.PIPE, text=True).stdout
