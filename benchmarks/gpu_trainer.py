"""`zero-optim train` on the GPU against the same training on the CPU: the losses of every step, for stages 0 to 2.

    python benchmarks/gpu_trainer.py

Both start from the same weights and see the same windows. Their matrix products round differently, so losses may differ
by UNITS units in the last place of the training's dtype, relative to the loss; loss scales may not differ at all.
(Seen after 50 steps of this model, of the loss: on an H100 3e-5 in fp16 and 1e-3 in bf16; between two builds of torch
on one CPU 9e-5 and 4e-4.)
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import lab
import torch
from zero_optim.bench.cases import DTYPES
from zero_optim.bench.record import Result
from zero_optim.bench.run import find_device

ROOT = Path(__file__).resolve().parents[1]
MODEL = ("--layers", "2", "--hidden", "128", "--heads", "2", "--seq", "128", "--batch", "4")
MODEL += ("--lr", "2e-3", "--warmup", "10")
TINY = ("--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "2")
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
STEPS, UNITS = 50, 2
AT_ONCE = 4  # trainings under way: each has a process group and a device context of its own

Log = list[dict[str, Any]]


def train(device: str, dtype: str, stage: int, flags: Sequence[str], folder: Path) -> Log | str:
    """Train on one rank, in the device's process group (NCCL or gloo). Returns the log, or why there is none."""
    out = folder / f"{device}-{dtype}-{stage}"
    words = ["--ranks", 1, "--device", device, "--dtype", dtype, "--stage", stage, "--out", out]
    command = [sys.executable, "-m", "zero_optim", "train", *map(str, words), "--no-checkpoint", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // AT_ONCE))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        return f"exit code {done.returncode}: {done.stdout.strip()[-500:]}"
    if f" on {device} ({BACKENDS[device]}," not in done.stdout:
        return f"did not run on {device} under {BACKENDS[device]}: {done.stdout[:500]}"
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def compare(log: Log | str, cpu: Log | str, steps: int, dtype: str) -> dict[str, Any]:
    """Compare a log with the CPU's: the largest |loss - CPU's loss| / CPU's loss, and what is wrong, if anything."""
    tolerance = UNITS * torch.finfo(DTYPES[dtype]).eps
    if isinstance(log, str) or isinstance(cpu, str):
        return {"problem": log if isinstance(log, str) else f"no run on the CPU: {cpu}"}
    losses = [[math.nan if record["loss"] is None else record["loss"] for record in of] for of in (log, cpu)]
    differences = [abs(a - b) / b for a, b in zip(*losses, strict=False)]
    worst = max(range(len(differences)), key=lambda i: (math.isnan(differences[i]), differences[i]))
    problem = None
    if not len(log) == len(cpu) == steps:
        problem = f"{len(log)} steps here and {len(cpu)} on the CPU instead of {steps}"
    elif [record["loss_scale"] for record in log] != [record["loss_scale"] for record in cpu]:
        problem = "the loss scale moved differently"
    elif not differences[worst] <= tolerance:
        problem = "beyond rounding"
    found = {"steps": len(log), "first_loss": losses[0][0], "last_loss": losses[0][-1]}
    return {**found, "difference": differences[worst], "step": worst + 1, "tolerance": tolerance, "problem": problem}


def main(options: Any) -> int:
    device = find_device(options.device)
    # Text that every checkout has; little in a rehearsal, as validation goes through a tenth of it.
    tiny = device.type == "cpu"
    data = str(ROOT / "python" / ("zero_optim/rules" if tiny else ""))
    steps, dtypes, stages = (3, ["bf16"], [0]) if tiny else (STEPS, ["fp16", "bf16"], [0, 1, 2])
    flags = [*(TINY if tiny else MODEL), "--steps", str(steps), "--data", data]
    runs = [(device.type, dtype, stage) for dtype, stage in product(dtypes, stages)]
    wanted = dict.fromkeys([*(("cpu", dtype, 2) for dtype in dtypes), *runs])
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        logs = dict(zip(wanted, pool.map(lambda run: train(*run, flags, Path(folder)), wanted), strict=True))
    result = Result(device, options.out, options.write, "trainer", flags=flags)
    wrong = 0
    for run in runs:
        of = compare(logs[run], logs["cpu", run[1], 2], steps, run[1])
        result.add([{"op": "trainer", "backend": f"stage{run[2]}", "dtype": run[1], **of}])
        wrong += of["problem"] is not None
        off = f"off the CPU's losses by {of['difference']:.1e} of {of['tolerance']:.1e}" if "difference" in of else ""
        print(f"{run[1]} stage {run[2]}: {off} {of['problem'] or ''}", flush=True)
    print(f"{len(runs) - wrong} of {len(runs)} trainings gave the CPU's losses within rounding")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(lab.run_script(lab.parser_of(__file__, "Compares trainings on a GPU with the CPU's.", device=None), main))
