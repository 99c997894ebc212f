"""Whether tests compile the kernels for every architecture, or for one.

For three it takes minutes. ``make cuda-check`` looks into all that is made for them, and then has this file, as a
script, write to ``checked.json`` what it was made of. As long as sources, compiler and tests are those, other runs
compile for one architecture.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import runpy
from collections.abc import Iterable
from pathlib import Path

import kept

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RECORD = TESTS / "checked.json"
EVERY = "ZERO_KERNELS_EVERY_ARCHITECTURE"  # an environment variable; set, it is every one

CUDA = ("setup.py", "csrc/*.h", "csrc/rules/*", "csrc/cuda/*", "tests/cuda/*.py")
TRITON = ("zero_kernels/**/*.py", "tests/triton_backend/*.py")


def of_cuda(nvcc: str, root: Path = ROOT) -> str:
    """A name for all that the machine code of nvcc, and what is asked of it, depend on."""
    return _name(kept.version([nvcc]), CUDA, root)


def of_triton(root: Path = ROOT) -> str:
    return _name(importlib.metadata.version("triton"), TRITON, root)


def every_architecture(what: str, name: str, record: Path = RECORD) -> bool:
    """``what``: "cuda" or "triton"; ``name``: what it is made of now."""
    return bool(os.environ.get(EVERY)) or json.loads(record.read_text()).get(what) != name


def _name(compiler: str, patterns: Iterable[str], root: Path) -> str:
    files = sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})
    contents = [compiler.encode(), *(part for file in files for part in (file.name.encode(), file.read_bytes()))]
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()[:16]


def main() -> None:
    """What is not here has not been looked into, nor what a list of architectures has left out: its name stays. Triton
    brings the disassembler."""
    names = json.loads(RECORD.read_text())
    if importlib.util.find_spec("triton") is not None:
        names["triton"] = of_triton()
        nvcc = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["nvcc"]()
        if nvcc is not None and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            names["cuda"] = of_cuda(nvcc)
    RECORD.write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    main()
