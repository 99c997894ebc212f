"""The CUDA library for the tests: built by whoever needs it first, kept, and built anew when it would differ."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from build_cache import one_at_a_time, used, version
from toolchain import ROOT

PTX = "ptx"  # the folder of it, beside the library
NVCC_FLAGS = "NVCC_APPEND_FLAGS"  # nvcc reads flags there, too


def cached_library(setup_py: SimpleNamespace, nvcc: str, cache: Path) -> Path:
    """The library in ``cache``. Raises setup.py's BuildError."""
    library = setup_py.cuda_library(setup_py.torch_directory())
    folder = cache / key(setup_py, library, nvcc)
    with one_at_a_time(cache):
        if not folder.exists():
            # Under another name until it is whole. What a killed build has left there, ninja completes.
            unfinished = folder.with_suffix(".unfinished")
            with keeping_ptx(unfinished / PTX, setup_py.arch_flags()):
                setup_py.build(library, unfinished)
            unfinished.rename(folder)
        used(folder)
    return folder / library.file


@contextmanager
def keeping_ptx(folder: Path, arch_flags: Sequence[str]) -> Iterator[None]:
    """nvcc leaves in ``folder`` the PTX that it makes on the way to machine code: ``pack.compute_80.ptx``. For one
    architecture alone it calls it ``pack.ptx``, which is given the longer name.

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
        made_for = re.findall(r"arch=(compute_\w+)", " ".join(arch_flags))
        for left in folder.iterdir():
            if left.suffix != ".ptx":
                left.unlink()
            elif len(made_for) == 1 and ".compute_" not in left.name:
                left.rename(left.with_suffix(f".{made_for[0]}.ptx"))


def key(setup_py: SimpleNamespace, library: object, nvcc: str, root: Path = ROOT) -> str:
    """A name for all that the library depends on: sources, flags, architectures, compilers, torch. Not for where the
    checkout and torch are: two checkouts of the same sources share it."""
    torch = setup_py.torch_directory()
    made = repr(library).replace(str(torch), "torch").replace(str(root), "checkout")  # torch may be within
    flags = [os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", NVCC_FLAGS)]
    words = [made, repr(setup_py.compiler()), version(setup_py.compiler()), version([nvcc]), *flags]
    sources = [root / "setup.py", *sorted((root / "csrc").glob("*.h"))]
    sources += [file for folder in ("rules", "cuda") for file in sorted((root / "csrc" / folder).iterdir())]
    contents = [*(word.encode() for word in words), *(file.read_bytes() for file in (torch / "version.py", *sources))]
    digests = [hashlib.sha256(content).digest() for content in contents]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]
