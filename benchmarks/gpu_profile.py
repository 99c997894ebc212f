"""One launch of each op on each backend under Nsight Compute: time, bytes of memory, occupancy, registers.

    python benchmarks/gpu_profile.py --out profile.json

Exit codes: 0; 1 where ncu fails; 77 where it is missing, or may not read the counters. On a CPU the ops run without it.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_results import SKIP_CODE

OPS = ("adam_step", "pack", "grad_stats")
NUMEL = {"cuda": 2**26, "cpu": 4096}
SECONDS = 45
FORBIDDEN = "ERR_NVGPUCTRPERM"
METRICS = {
    "ns": "gpu__time_duration.sum",
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
}


def launch(device: str) -> None:
    """Run each op twice on each backend; only the second run is profiled."""
    import torch
    from zero_optim.bench.case import Setting, choose_backends
    from zero_optim.bench.run import CASES

    where = torch.device(device)
    for op in OPS:
        case = CASES[op](Setting(where, "bf16", NUMEL[device], choose_backends(where, None)))
        for backend in case.setting.backends:
            (job,) = case.jobs[backend]
            job()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
            job()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()
            print(f"{op} {backend}: launched", flush=True)
        del case


def read(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Read ncu's CSV: a line of names, one of units, then a kernel a line. Other lines in between are skipped."""
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(table) < 2:
        return []
    names, _, *kernels = table
    found = []
    for cells in kernels:
        by_name = dict(zip(names, cells, strict=False))
        figures = {key: _number(by_name.get(metric, "")) for key, metric in METRICS.items()}
        found.append({"kernel": by_name.get("Kernel Name", "?").partition("(")[0], **figures})
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def line_of(kernel: dict[str, Any]) -> str:
    moved = (kernel["bytes_read"] or 0) + (kernel["bytes_written"] or 0)
    speed = f"{moved / kernel['ns']:.0f} GB/s" if kernel["ns"] else "no time"
    shares = f"memory {kernel['memory_percent']} %, occupancy {kernel['occupancy_percent']} %"
    return f"{kernel['kernel']}: {kernel['ns']} ns, {speed}, {shares}, {kernel['registers']} registers"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="one launch of each op under Nsight Compute")
    parser.add_argument("--device", choices=NUMEL, default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        launch("cpu")
        options.out.write_text(json.dumps({"numel": NUMEL["cpu"], "kernels": []}) + "\n")
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu is not on the PATH", flush=True)
        return SKIP_CODE
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--clock-control", "none"]  # leave the GPU's clocks alone: others may use it, too
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "launch"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        print(f"{(late.stdout or b'')[-2000:]!r}\nncu was not through in {SECONDS} s", flush=True)
        return 1
    kernels = read(done.stdout.splitlines())
    options.out.write_text(json.dumps({"numel": NUMEL["cuda"], "kernels": kernels}, indent=1) + "\n")
    if FORBIDDEN in done.stdout:
        print(f"the driver does not let this user read the GPU's counters ({FORBIDDEN})", flush=True)
        return SKIP_CODE
    for kernel in kernels:
        print(line_of(kernel), flush=True)
    if done.returncode or not kernels:
        print(f"{done.stdout[-2000:]}\nncu has ended with {done.returncode}", flush=True)
        return 1
    print(f"{len(kernels)} kernels profiled", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["launch"]:
        launch("cuda")
        sys.exit()
    sys.exit(main())
