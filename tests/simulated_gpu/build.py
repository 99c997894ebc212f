"""Builds the C++ part of the device, once for each version of torch and of the sources."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_cache

HERE = Path(__file__).resolve().parent

TORCH = "2.13"
"""The minor version whose internals the device uses: the virtual functions of ``c10::impl::DeviceGuardImplInterface``
and ``at::CUDAHooksInterface``, and the kernels ``at::native::view``, ``view_dtype``, ``as_strided_tensorimpl`` and
``_reshape_alias``. They have no promise of stability."""

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
LIBRARIES = ("-ltorch_cpu", "-ltorch", "-lc10")


class Unavailable(RuntimeError):
    """The device cannot be built here. The text is a line for a test that is skipped."""


@functools.cache
def torch_directory() -> Path:
    """Where torch is installed, without importing it. Raises Unavailable."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("torch is not installed")
    return Path(spec.origin).parent


def library() -> Path:
    """The shared library, built if it is not there. Several processes may ask at once.

    Raises Unavailable, and RuntimeError where the sources do not compile.
    """
    if sys.platform != "linux":
        raise Unavailable("the simulated GPU is for Linux")
    torch = torch_directory()
    version = _version(torch)
    if not version.startswith(f"{TORCH}."):
        raise Unavailable(f"the simulated GPU uses internals of torch {TORCH}, and this is {version}")
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("this torch is built for CUDA, and has a device of its own")
    compiler = _compiler()
    cache = build_cache.folder("simulated_gpu")
    target = cache / f"simulated_gpu-{version}-{_digest(compiler, torch)}.so"
    with build_cache.one_at_a_time(cache):
        if not target.exists():
            _compile(compiler, torch, target)
        build_cache.used(target)
    return target


def _version(torch: Path) -> str:
    found = re.search(r"^__version__ = '([^']+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        raise Unavailable("there is no C++ compiler: install one, or name it in CXX")
    return found


def _digest(compiler: str, torch: Path) -> str:
    digest = hashlib.sha256(
        " ".join((compiler, build_cache.version([compiler]), str(torch), *FLAGS, *LIBRARIES)).encode()
    )
    for source in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, torch: Path, target: Path) -> None:
    unfinished = target.with_suffix(".unfinished")
    include = torch / "include"
    command = [compiler, *FLAGS, str(HERE / "device.cpp"), "-o", str(unfinished)]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    command += [f"-L{torch / 'lib'}", *LIBRARIES, f"-Wl,-rpath,{torch / 'lib'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated GPU does not compile: {' '.join(command)}\n{done.stderr[:4000]}")
    unfinished.rename(target)
