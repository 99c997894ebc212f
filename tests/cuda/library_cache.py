"""The CUDA library for the tests: built by whoever needs it first, kept, and built anew when it would differ."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from toolchain import ROOT, run

PTX = "ptx"  # the folder of it, beside the library
NVCC_FLAGS = "NVCC_APPEND_FLAGS"  # nvcc reads flags there, too


def cached_library(setup_py: SimpleNamespace, nvcc: str, cache: Path) -> Path:
    """The library in ``cache``. Raises setup.py's BuildError.

    A folder's name says what its library is made of. So another branch, or another nvcc, never finds the wrong one.
    """
    library = setup_py.cuda_library(setup_py.torch_directory())
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key(setup_py, library, nvcc)
    with one_at_a_time(cache / "lock"):
        if not folder.exists():
            # Under another name until it is whole. What a killed build has left there, ninja completes.
            unfinished = folder.with_suffix(".unfinished")
            with keeping_ptx(unfinished / PTX):
                setup_py.build(library, unfinished)
            unfinished.rename(folder)
            for old in cache.iterdir():
                if old.is_dir() and old != folder:
                    shutil.rmtree(old)
    return folder / library.file


@contextmanager
def keeping_ptx(folder: Path) -> Iterator[None]:
    """nvcc leaves in ``folder`` the PTX that it makes on the way to machine code: ``adam.compute_80.ptx``.

    To have it make the PTX once more takes half as long as the library.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(NVCC_FLAGS)
    os.environ[NVCC_FLAGS] = shlex.join([*shlex.split(before or ""), "--keep", "--keep-dir", str(folder.resolve())])
    try:
        yield
    finally:
        os.environ.pop(NVCC_FLAGS)
        if before is not None:
            os.environ[NVCC_FLAGS] = before
        for left in folder.iterdir():
            if left.suffix != ".ptx":
                left.unlink()


def key(setup_py: SimpleNamespace, library: object, nvcc: str, root: Path = ROOT) -> str:
    """A name for all that the library depends on: sources, flags, architectures, compilers, torch."""
    sources = [root / "setup.py", *sorted((root / "csrc").glob("*.h")), *sorted((root / "csrc/cuda").iterdir())]
    torch_version = (setup_py.torch_directory() / "version.py").read_bytes()
    parts = [repr(library).encode(), repr(setup_py.compiler()).encode(), run(nvcc, "--version").encode(), torch_version]
    digests = [hashlib.sha256(part).digest() for part in [*parts, *(source.read_bytes() for source in sources)]]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Workers wait here for the one that builds. The system opens the lock when its holder dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
