"""What a compiled library may need of torch, read from its symbols."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SHIMS = ("csrc/stable/c/shim.h", "csrc/inductor/aoti_torch/c/shim.h")

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm reads the symbols")


def undefined_symbols(library: Path) -> set[str]:
    lines = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in lines.stdout.splitlines()}


def check_stable_abi(library: Path, own: str) -> None:
    """Of torch the library needs ``own``, a function that it is known to call, and nothing beyond the stable ABI."""
    include = Path(torch.__file__).parent / "include/torch"
    headers = "".join((include / shim).read_text() for shim in SHIMS)
    stable = set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", headers))
    needed = undefined_symbols(library)
    of_torch = {name for name in needed if name.startswith(("torch_", "aoti_"))}
    assert {own, "aoti_torch_get_data_ptr"} <= of_torch
    assert of_torch <= stable
    # What is left belongs to the C and C++ libraries: versioned, or the linker's own weak names.
    others = {name for name in needed - of_torch if "@" not in name}
    assert others <= {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}
    mangled_torch = re.compile(r"_Z.*(2at|3c10|5torch)")
    assert not [name for name in needed if mangled_torch.search(name) or name.startswith(("Py", "_Py"))]
