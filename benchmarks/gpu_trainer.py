"""`zero-optim train` on the GPU against the same training on the CPU: the losses of every step, for stages 0 to 2.

    python benchmarks/gpu_trainer.py --out trainer.json

Both start from the same weights and see the same windows. Their matrix products round differently, so losses may differ
by UNITS units in the last place of the training's dtype, relative to the loss; loss scales may not differ at all.
(Seen after 50 steps of this model, of the loss: on an H100 3e-5 in fp16 and 1e-3 in bf16; between two builds of torch
on one CPU 9e-5 and 4e-4.)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = ("--layers", "2", "--hidden", "128", "--heads", "2", "--seq", "128", "--batch", "4")
MODEL += ("--lr", "2e-3", "--warmup", "10")
TINY = ("--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "2")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
UNITS = 2
BEYOND = "beyond rounding"
AT_ONCE = 4  # trainings under way: each has a process group and a device context of its own

Log = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One training on one rank."""

    device: str
    dtype: str
    stage: int

    def __str__(self) -> str:
        return f"{self.device} {self.dtype} stage {self.stage}"


@dataclass(frozen=True)
class Comparison:
    """A run compared with the CPU's. ``difference``: the largest |loss - CPU's loss| / CPU's loss, at ``step``."""

    run: Run
    steps: int
    first_loss: float | None
    last_loss: float | None
    difference: float | None
    step: int | None
    tolerance: float
    problem: str | None

    def line(self) -> str:
        if self.difference is None:
            return f"{self.run!s:20} {self.problem}"
        losses = f"{self.steps} steps, loss {self.first_loss:.4f} to {self.last_loss:.4f}"
        off = f"off the CPU's by {self.difference:.1e} at most (step {self.step}; allowed {self.tolerance:.1e})"
        return f"{self.run!s:20} {losses}, {off}{': ' + self.problem if self.problem else ''}"


def train(run: Run, flags: Sequence[str], folder: Path) -> Log | str:
    """Train on one rank, in the device's process group (NCCL or gloo). Returns the log, or why there is none."""
    out = folder / str(run).replace(" ", "-")
    words = ["--ranks", 1, "--device", run.device, "--dtype", run.dtype, "--stage", run.stage, "--out", out]
    command = [sys.executable, "-m", "zero_optim", "train", *map(str, words), "--no-checkpoint", *flags]
    # Several trainings share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // AT_ONCE))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f"--- {run}\n{done.stdout}", flush=True)
        return f"exit code {done.returncode}: {done.stdout.strip()[-500:]}"
    if f" on {run.device} ({BACKENDS[run.device]}," not in done.stdout:
        return f"did not run on {run.device} under {BACKENDS[run.device]}: {done.stdout[:500]}"
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def compare(run: Run, log: Log | str, cpu: Log | str, steps: int) -> Comparison:
    tolerance = UNITS * torch.finfo(DTYPES[run.dtype]).eps
    failed = log if isinstance(log, str) else f"no run on the CPU: {cpu}" if isinstance(cpu, str) else None
    if failed is not None or isinstance(log, str) or isinstance(cpu, str):
        return Comparison(run, steps, None, None, None, None, tolerance, failed)
    losses = [[math.nan if record["loss"] is None else record["loss"] for record in of] for of in (log, cpu)]
    differences = [abs(a - b) / b for a, b in zip(*losses, strict=False)]
    worst = max(range(len(differences)), key=lambda i: (math.isnan(differences[i]), differences[i]))
    problem = None
    if len(log) != steps or len(cpu) != steps:
        problem = f"{len(log)} steps here and {len(cpu)} on the CPU instead of {steps}"
    elif [record["loss_scale"] for record in log] != [record["loss_scale"] for record in cpu]:
        problem = "the loss scale moved differently"
    elif not differences[worst] <= tolerance:
        problem = BEYOND
    return Comparison(run, len(log), losses[0][0], losses[0][-1], differences[worst], worst + 1, tolerance, problem)


def main() -> int:
    parser = argparse.ArgumentParser(description="the trainer on a GPU against the trainer on the CPU")
    parser.add_argument("--device", choices=BACKENDS, default="cuda", help="cpu rehearses")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="a model that only shows that everything runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    # Text that every checkout has; little in a rehearsal, as validation goes through a tenth of it.
    data = str(ROOT / "python" / ("zero_optim/rules" if options.tiny else ""))
    flags = [*(TINY if options.tiny else MODEL), "--steps", str(options.steps), "--data", data]
    baselines = [Run("cpu", dtype, 2) for dtype in options.dtypes]
    runs = [Run(options.device, dtype, stage) for dtype in options.dtypes for stage in options.stages]
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        wanted = list(dict.fromkeys([*baselines, *runs]))
        logs = dict(zip(wanted, pool.map(lambda run: train(run, flags, Path(folder)), wanted), strict=True))
    compared = [compare(run, logs[run], logs[Run("cpu", run.dtype, 2)], options.steps) for run in runs]
    cpu_losses = {
        run.dtype: [record["loss"] for record in log] for run in baselines if not isinstance(log := logs[run], str)
    }
    result = {"flags": flags, "runs": [asdict(comparison) for comparison in compared], "cpu_losses": cpu_losses}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for comparison in compared:
        print(comparison.line())
    right = sum(comparison.problem is None for comparison in compared)
    print(f"{right} of {len(compared)} trainings gave the CPU's losses within rounding")
    return 0 if right == len(compared) else 1


if __name__ == "__main__":
    sys.exit(main())
