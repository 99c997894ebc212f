"""Builds the C++ part of the device, once for each version of torch and of the sources."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_cache
import torch

HERE = Path(__file__).resolve().parent

TORCH = "2.13"
"""The minor version whose internals the device uses: the virtual functions of ``c10::impl::DeviceGuardImplInterface``
and ``at::CUDAHooksInterface``, and the kernels ``at::native::view``, ``view_dtype``, ``as_strided_tensorimpl`` and
``_reshape_alias``. They have no promise of stability."""

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
LIBRARIES = ("-ltorch_cpu", "-lc10")
INSTALLED = Path(torch.__file__).parent


class Unavailable(RuntimeError):
    """The device cannot be built here. The text is a line for a test that is skipped."""


@functools.cache
def library() -> Path:
    """The shared library, built if it is not there. Several processes may ask at once.

    Raises Unavailable, and RuntimeError where the sources do not compile.
    """
    if sys.platform != "linux":
        raise Unavailable("the simulated GPU is for Linux")
    version = torch.__version__
    if not version.startswith(f"{TORCH}."):
        raise Unavailable(f"the simulated GPU uses internals of torch {TORCH}, and this is {version}")
    if torch.backends.cuda.is_built():
        raise Unavailable("this torch is built for CUDA, and has a device of its own")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise Unavailable("there is no C++ compiler: install one, or name it in CXX")
    cache = build_cache.folder("simulated_gpu")
    target = cache / f"simulated_gpu-{version}-{_digest(compiler)}.so"
    with build_cache.one_at_a_time(cache):
        if not target.exists():
            _compile(compiler, target)
        build_cache.used(target)
    return target


def _digest(compiler: str) -> str:
    digest = hashlib.sha256(
        " ".join((compiler, build_cache.version([compiler]), str(INSTALLED), *FLAGS, *LIBRARIES)).encode()
    )
    for source in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, target: Path) -> None:
    unfinished = target.with_suffix(".unfinished")
    include, libraries = INSTALLED / "include", INSTALLED / "lib"
    command = [compiler, *FLAGS, str(HERE / "device.cpp"), "-o", str(unfinished)]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    command += [f"-L{libraries}", *LIBRARIES, f"-Wl,-rpath,{libraries}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated GPU does not compile: {' '.join(command)}\n{done.stderr[:4000]}")
    unfinished.rename(target)
