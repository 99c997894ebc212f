"""A check that the compiled library runs on this device; where it does not, it is built for the architecture.

python benchmarks/gpu_build.py cuda
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[1]
PROBE = "import sys; from zero_kernels import compiled; print(compiled.why_unusable(sys.argv[1]) or '')"


def why_unusable(name: str) -> str:
    """Say why the library cannot be used on this device; empty: it can. A fresh process asks: a library loads once."""
    command = [sys.executable, "-c", PROBE, name]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def why_stale(name: str) -> str:
    """Say which source is newer than the library; empty: none."""
    from zero_kernels import compiled

    library = compiled.library(name)
    sources = [ROOT / "setup.py", *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if library.exists() and newest.stat().st_mtime > library.stat().st_mtime:
        return f"{newest.relative_to(ROOT)} is newer than {library.name}"
    return ""


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zero_kernels_setup", ROOT / "setup.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{ROOT / 'setup.py'} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(arch: str) -> None:
    """Build into the checkout by setup.py's own functions, which need no recent setuptools to read pyproject.toml."""
    os.environ["TORCH_CUDA_ARCH_LIST"] = arch
    setup = load_setup()
    for name, built in setup.build_all(ROOT / "build" / "gpu-check").items():
        setup.install(ROOT / "zero_kernels", name, built)
        print(f"{name}: {built}", flush=True)


def main(name: str) -> int:
    reason = why_unusable(name)
    if name == "cuda" and (reason := reason or why_stale(name)):
        print(f"building: {reason}", flush=True)
        build("{}.{}".format(*torch.cuda.get_device_capability()))
        reason = why_unusable(name)
    subprocess.run([sys.executable, "-m", "zero_optim", "doctor"], check=False)
    print(f"the {name} library is not usable: {reason}" if reason else f"the {name} library is usable", flush=True)
    return 1 if reason and name == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
