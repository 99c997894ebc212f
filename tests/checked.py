"""Whether the code of the CUDA and Triton kernels was tested since it last changed.

To compile the kernels for every architecture, and to run them without a GPU, takes minutes. ``make cuda-check`` does
so, and then has this file, as a script, write to ``checked.json`` a name for all that the result depends on: sources,
compilers, tests. As long as the name is the same, other runs skip those tests.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
from collections.abc import Iterable
from pathlib import Path

import kept
import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RECORD = TESTS / "checked.json"
ALWAYS = "ZERO_KERNELS_CHECK_KERNELS"  # an environment variable; where it is set, no test is skipped
REASON = "`make cuda-check` has run it on what is there now"

SPECIFICATION = ("zero_kernels/*.py", "zero_kernels/rules/*.py", "tests/kernels/cases.py")
CUDA = ("setup.py", "csrc/*.h", "csrc/rules/*", "csrc/cuda/*", "tests/cuda/*.py", "tests/cuda/host/*", *SPECIFICATION)
TRITON = ("zero_kernels/**/*.py", "tests/triton_backend/*.py", "tests/kernels/cases.py")


def of_cuda(nvcc: str, root: Path = ROOT) -> str:
    """The name of what the library that ``nvcc`` makes, and the tests of its code, depend on."""
    return _name([kept.version([nvcc]), kept.version(["g++"])], CUDA, root)


def of_triton(root: Path = ROOT) -> str:
    """The name of what Triton's kernels, compiled or interpreted, and their tests depend on."""
    return _name([_release("triton"), _release("numpy")], TRITON, root)


def is_checked(what: str, name: str, record: Path = RECORD) -> bool:
    """``what``: "cuda" or "triton"; ``name``: that of what is there now."""
    return not os.environ.get(ALWAYS) and json.loads(record.read_text()).get(what) == name


def unless_checked(what: str, name: str) -> pytest.MarkDecorator:
    """Skips tests that ``make cuda-check`` has run on what is there now."""
    return pytest.mark.skipif(is_checked(what, name), reason=REASON)


def _release(package: str) -> str:
    """Its version, without the build that ``+`` begins; empty where it is not installed."""
    found = importlib.util.find_spec(package)
    return importlib.metadata.version(package).partition("+")[0] if found else ""


def _name(tools: Iterable[str], patterns: Iterable[str], root: Path) -> str:
    files = sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})
    contents = [word.encode() for word in (*tools, _release("torch"), platform.machine())]
    contents += [part for file in files for part in (file.name.encode(), file.read_bytes())]
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()[:16]


def main() -> None:
    """A name stays as it was where its tests could not run, or ran for other architectures than the default ones."""
    names = json.loads(RECORD.read_text())
    if importlib.util.find_spec("triton") is not None:  # which brings the disassembler, too
        names["triton"] = of_triton()
        nvcc = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["nvcc"]()
        if nvcc is not None and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            names["cuda"] = of_cuda(nvcc)
    RECORD.write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    main()
