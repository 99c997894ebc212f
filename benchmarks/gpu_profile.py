"""One launch of each op on each backend under Nsight Compute: time, bytes, occupancy, registers, why warps wait.

    python benchmarks/gpu_profile.py

Exit codes: 0; 1 where ncu fails; 77 where it is missing, or may not read the counters. On a CPU the ops run without it.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import lab
import torch
from gpu_ranks import SKIP_CODE
from zero_optim.bench.cases import Setting, choose_backends
from zero_optim.bench.record import Result
from zero_optim.bench.run import CASES, find_device

NUMEL = {"cuda": 2**26, "cpu": 4096}
SECONDS = 55
FORBIDDEN = "ERR_NVGPUCTRPERM"
METRICS = {
    "ns": "gpu__time_duration.sum",
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",  # of warps
}
STALLS = ("long_scoreboard", "short_scoreboard", "lg_throttle", "mio_throttle", "math_pipe_throttle", "wait", "barrier")
METRICS |= {f"stalled_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS}


def launch(device: str) -> None:
    """Run each op twice on each backend; only the second run is profiled."""
    where = torch.device(device)
    for op, make_case in CASES.items():
        case = make_case(Setting(where, "bf16", NUMEL[device], choose_backends(where, None)))
        ways = [f"{backend}{form}" for backend in case.setting.backends for form in ("", ", split8, int8")]
        for backend, (job,) in ((way, case.jobs[way]) for way in ways if way in case.jobs):
            job()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
            job()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()
            print(f"{op} {backend}: launched", flush=True)


def read(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Read ncu's CSV: a line of names, one of units, then a kernel a line. Other lines in between are skipped."""
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    cells = [dict(zip(table[0], kernel, strict=False)) for kernel in table[2:]]
    return [
        {"kernel": of.get("Kernel Name", "?").partition("(")[0]}
        | {key: _number(of.get(metric, "")) for key, metric in METRICS.items()}
        for of in cells
    ]


def _number(text: str) -> float | None:
    return float(text.replace(",", "")) if text[:1].isdigit() else None


def main(options: Any) -> int:
    device = find_device(options.device)
    if device.type == "cpu":
        launch("cpu")
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
    if FORBIDDEN in done.stdout:
        print(f"the driver does not let this user read the GPU's counters ({FORBIDDEN})", flush=True)
        return SKIP_CODE
    kernels = read(done.stdout.splitlines())
    if done.returncode or not kernels:
        print(f"{done.stdout[-2000:]}\nncu has ended with {done.returncode}", flush=True)
        return 1
    result = Result(device, options.out, options.write, "profile")
    same = {"op": "profile", "dtype": "bf16", "numel": NUMEL["cuda"]}
    result.add([{**same, "backend": of["kernel"], **of} for of in kernels])
    for of in kernels:
        moved = ((of["bytes_read"] or 0) + (of["bytes_written"] or 0)) / (of["ns"] or 1)
        shares = f"memory {of['memory_percent']} %, occupancy {of['occupancy_percent']} %"
        print(f"{of['kernel']}: {of['ns']} ns, {moved:.0f} GB/s, {shares}, {of['registers']} registers", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["launch"]:
        launch("cuda")
        sys.exit()
    sys.exit(lab.run_script(lab.parser_of(__file__, "Profiles one launch of each op.", device=None), main))
