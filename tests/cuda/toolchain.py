"""What the tests of CUDA code ask of nvcc and of the tools beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
ARCHS = ("80", "90", "100")
PTX_ARCHS = ("80", "90", "100")  # where code is made for 80 too, that for 90 is made from its PTX
STEPS = ("step_adamw", "step_amsgrad", "step_lion", "step_sgd", "step_muon")
SOURCES = (*STEPS, "ema", "grad_stats", "hyper_table", "pack")
BODIES = ("step", "ema", "grad_stats", "hyper_table", "pack")


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def to_ptx(setup_py: SimpleNamespace, nvcc: str, name: str, arch: str, out: Path, *more: str) -> Path:
    _, source, flags = setup_py.cuda_library(setup_py.torch_directory()).compile[name]
    run(nvcc, *setup_py.NVCC_FLAGS, *flags, *more, "-ptx", f"-arch=compute_{arch}", source, "-o", out)
    return out
