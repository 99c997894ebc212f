"""Two ranks on this machine's GPUs, or on its only one; and which NCCL lets ranks use one together.

    python benchmarks/gpu_ranks.py cuda          # two ranks have each other's sum, without any optimizer

Exit codes: 0; 1 where the sum is wrong or does not come within SECONDS; 77 where NCCL takes one rank a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SECONDS = 45
SEVERAL_RANKS = (2, 30)  # the first NCCL that heeds NCCL_MULTI_RANK_GPU_ENABLE
SKIP_CODE = 77
REMEDY = (
    "make gpu-check ARGS='--nccl PATH' preloads a newer one: PATH is the libnccl.so.2 of the wheel "
    "nvidia-nccl-cu13>=2.30 (nvidia-nccl-cu12 for CUDA 12)"
)

# -- the version of NCCL: the library's own, as torch.cuda.nccl.version() is of the one at torch's compilation --------


def version_of(library: str | Path, mode: int = ctypes.DEFAULT_MODE) -> tuple[int, int, int]:
    """Read the version: (2, 28, 7). Raises OSError where it cannot be loaded, AttributeError where it is no NCCL."""
    code = ctypes.c_int()
    ctypes.CDLL(str(library), mode=mode).ncclGetVersion(ctypes.byref(code))
    major = 10_000 if code.value >= 10_000 else 1_000  # before 2.9 it had four digits
    return code.value // major, code.value % major // 100, code.value % 100


def loaded() -> tuple[int, ...] | None:
    """Read the version of the NCCL that this process has loaded; None: none, or NCCL is a part of torch."""
    try:
        return version_of("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return None


def why_not_on_one_gpu(ranks: int, gpus: int, version: Sequence[int]) -> str | None:
    """Give the reason why ranks cannot run, and the remedy; None: each has a GPU, or NCCL takes several on one."""
    if gpus >= ranks or tuple(version) >= SEVERAL_RANKS:
        return None
    have = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return (
        f"{ranks} ranks, {have}, and NCCL {'.'.join(map(str, version))} takes one rank a GPU: 2.30 takes more. {REMEDY}"
    )


def nccl_library(text: str) -> Path:
    """Check ``--nccl`` and give its absolute path. Raises ArgumentTypeError."""
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file; the wheel has it in nvidia/nccl/lib/libnccl.so.2")
    if {" ", ":"} & {*str(path)}:
        raise argparse.ArgumentTypeError(f"{path} has a space or a colon in it, at which LD_PRELOAD would be split")
    ask = "import sys, gpu_ranks; print(*gpu_ranks.version_of(sys.argv[1]))"  # a library is never unloaded
    done = subprocess.run([sys.executable, "-c", ask, path], cwd=Path(__file__).parent, capture_output=True, text=True)
    if done.returncode:
        raise argparse.ArgumentTypeError(f"{path} is no NCCL library: {(done.stderr.splitlines() or [''])[-1]}")
    version = tuple(map(int, done.stdout.split()))
    if version < SEVERAL_RANKS:
        raise argparse.ArgumentTypeError(f"{path} is NCCL {'.'.join(map(str, version))}; needed is 2.30 or later")
    return path


# -- two ranks ---------------------------------------------------------------------------------------------------------


def run_both(command: Sequence[str], device: str, seconds: float) -> int:
    """Run ``command`` as two ranks, with the path of a common store and the rank's number appended.

    Returns the exit code: 0, 1 where a rank fails or takes longer, SKIP_CODE where this NCCL takes one rank a GPU.
    """
    import torch

    if device == "cuda":
        version = loaded() or torch.cuda.nccl.version()[:3]
        if reason := why_not_on_one_gpu(2, torch.cuda.device_count(), version):
            print(reason, flush=True)
            return SKIP_CODE
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        ranks = [subprocess.Popen([*command, str(Path(folder, "store")), str(number)]) for number in range(2)]
        try:
            codes = [process.wait(seconds) for process in ranks]
        except subprocess.TimeoutExpired:
            print(f"not through within {seconds} s", flush=True)
            return 1
        finally:
            for process in ranks:
                with contextlib.suppress(OSError):
                    process.kill()
                process.wait()
    if any(codes):
        print(f"exit codes {codes}", flush=True)
    return int(any(codes))


def join(number: int, device: str, store: str, seconds: float) -> torch.device:
    """Make the default process group of two ranks. Returns this rank's device, which becomes the current one."""
    import torch
    import torch.distributed as dist

    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(where)
    backend, timeout = "nccl" if device == "cuda" else "gloo", timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=number, world_size=2, timeout=timeout)
    return where


def rank(device: str, store: str, number: int) -> None:
    import torch
    import torch.distributed as dist

    where = join(number, device, store, SECONDS)
    for numel in (1, 2**22):
        x = torch.full((numel,), float(number + 1), device=where)
        dist.all_reduce(x)
        if (low := float(x.min())) != 3.0 or float(x.max()) != 3.0:
            sys.exit(f"rank {number}: the sum of 1 and 2 is {low}")
    dist.destroy_process_group()
    print(f"rank {number} on {where}: the sums are right", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(rank(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    sys.exit(run_both([sys.executable, __file__, sys.argv[1]], sys.argv[1], SECONDS))
