"""The version of the NCCL in use, and whether it lets several ranks share one GPU. This file needs no torch.

`torch.cuda.nccl.version()` is the version that torch was compiled with. A preloaded library of the same soname is used
in its place, so the library itself is asked here.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SHARES_A_GPU = (2, 30)  # the first version that heeds NCCL_MULTI_RANK_GPU_ENABLE
SONAME = "libnccl.so.2"
SECONDS = 60
ASK = "import sys; sys.path[:0] = [sys.argv[2]]; import ctypes, gpu_nccl; print(gpu_nccl.ask(ctypes.CDLL(sys.argv[1])))"
REMEDY = (
    "make gpu-check ARGS='--nccl PATH' preloads a newer one: PATH is the libnccl.so.2 of the wheel "
    "nvidia-nccl-cu13>=2.30 (nvidia-nccl-cu12 for CUDA 12)"
)

Version = tuple[int, ...]


def ask(library: ctypes.CDLL) -> int:
    """Ask the library for its version, as one number: 22807 for 2.28.7. Raises AttributeError where it is no NCCL."""
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value


def parse(code: int) -> Version:
    """Split a version's number: (2, 28, 7) of 22807. Before 2.9 it had four digits."""
    major = 10_000 if code >= 10_000 else 1_000
    return code // major, code % major // 100, code % 100


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version[:3]))


def version_of(path: Path) -> Version:
    """Read the version of the NCCL in a file. A process of its own loads it: a library is never unloaded.

    Raises ValueError, in words, where the file can't be loaded or is no NCCL.
    """
    command = [sys.executable, "-c", ASK, str(path), str(Path(__file__).parent)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{path} was not loaded in {SECONDS} s") from None
    if done.returncode:
        raise ValueError(f"{path} is no NCCL library: {done.stderr.strip().splitlines()[-1] if done.stderr else ''}")
    return parse(int(done.stdout))


def loaded() -> Version | None:
    """Read the version of the NCCL library that this process has loaded; None: none, or NCCL is a part of torch."""
    try:
        return parse(ask(ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)))
    except (OSError, AttributeError):
        return None


def why_not_shared(ranks: int, gpus: int, version: Sequence[int]) -> str | None:
    """Say why ranks cannot run, and the remedy; None where each has a GPU, or this NCCL lets them share one."""
    if gpus >= ranks or tuple(version) >= SHARES_A_GPU:
        return None
    have = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{ranks} ranks, {have}, and NCCL {dotted(version)} takes one rank a GPU: 2.30 takes more. {REMEDY}"
