"""A check that two ranks can all-reduce on this machine's GPUs, or on its only one, without any optimizer.

    python benchmarks/gpu_two_ranks.py cuda

Exit codes: 0; 1 where the sum is wrong or does not come within SECONDS; 77 where NCCL takes one rank a GPU.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import gpu_nccl
import torch
import torch.distributed as dist
from gpu_results import SKIP_CODE

SECONDS = 45


def rank(number: int, device: str, store: str) -> None:
    where = join(number, device, store, SECONDS)
    for numel in (1, 2**22):
        x = torch.full((numel,), float(number + 1), device=where)
        dist.all_reduce(x)
        if (low := float(x.min())) != 3.0 or float(x.max()) != 3.0:
            sys.exit(f"rank {number}: the sum of 1 and 2 is {low}")
        print(f"rank {number} on {where}, {dist.get_backend()}: all_reduce of {numel:,} elements is right", flush=True)
    dist.destroy_process_group()


def run_both(command: Sequence[str], device: str, seconds: float) -> int:
    """Run ``command`` as two ranks at the same time. A common store's path and the rank's number are appended to it.

    Returns the exit code: 0, 1 where a rank fails or takes longer, SKIP_CODE where this NCCL takes one rank a GPU.
    """
    if device == "cuda":
        version = gpu_nccl.loaded() or torch.cuda.nccl.version()[:3]
        print(f"NCCL {gpu_nccl.dotted(version)}, {torch.cuda.device_count()} GPU(s)", flush=True)
        if reason := gpu_nccl.why_not_shared(2, torch.cuda.device_count(), version):
            print(reason, flush=True)
            return SKIP_CODE
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        store = str(Path(folder, "store"))
        ranks = [subprocess.Popen([*command, store, str(number)]) for number in range(2)]
        try:
            codes = [process.wait(seconds) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for process in ranks:
                with contextlib.suppress(OSError):
                    process.kill()
                process.wait()
    if codes == [0, 0]:
        return 0
    print(f"not through within {seconds} s" if codes == [None] else f"exit codes {codes}", flush=True)
    return 1


def join(number: int, device: str, store: str, seconds: float) -> torch.device:
    """Make the default process group of two ranks. Returns this rank's device, which becomes the current one."""
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(where)
    backend, patience = "nccl" if device == "cuda" else "gloo", timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=number, world_size=2, timeout=patience)
    return where


def main(device: str) -> int:
    code = run_both([sys.executable, __file__, device], device, SECONDS)
    if code == 0:
        print("two ranks have each other's sums", flush=True)
    return code


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    rank(int(sys.argv[3]), sys.argv[1], sys.argv[2])
