"""The CUDA library loads into a torch that has a libtorch_cuda, and registers every op there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stable_abi import check_stable_abi, needs_nm

from zero_kernels import compiled

ROOT = Path(__file__).parents[2]
LOAD = """
import sys, torch
for library in sys.argv[1:]:
    torch.ops.load_library(library)
for op in ("foreach_step", "ema", "pack", "unpack", "grad_stats", "hyper_table"):
    print(op, torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_kernels_C::{op}", "CUDA"))
print(torch.ops.zero_kernels_C.cuda_archs())
print(torch.ops.zero_kernels_C.cuda_problem())
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ makes the stand-in")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a libtorch_cuda of its own")
@pytest.mark.kernels
def test_every_op_is_registered(library: Path, tmp_path: Path) -> None:
    stand_in = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n'
    (tmp_path / "stand_in.cpp").write_text(stand_in)
    made = tmp_path / "libtorch_cuda.so"
    command = ["g++", "-shared", "-fPIC", str(tmp_path / "stand_in.cpp"), "-o", str(made)]
    subprocess.run([*command, f"-Wl,-soname,{made.name}"], check=True)
    libraries = [str(compiled.library("cpu")), str(library)]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LOAD, *libraries], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *registered, archs, problem = done.stdout.splitlines()
    assert [line.split()[1] for line in registered] == ["True"] * 6
    assert archs
    assert re.fullmatch(r"built by CUDA \d+\.\d, but the driver is of CUDA 0\.0: .*", problem)


@needs_nm
@pytest.mark.kernels
def test_only_the_stable_abi_is_needed(library: Path) -> None:
    check_stable_abi(library, "aoti_torch_get_current_cuda_stream")


# A wheel with it is manylinux_2_28: these are glibc's version, and that of GCC 8's libstdc++.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}


@needs_nm
@pytest.mark.kernels
def test_an_old_linux_has_all_that_is_needed(library: Path) -> None:
    needed = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, stdout=subprocess.PIPE, text=True)
    found = re.findall(r"@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)$", needed.stdout, re.MULTILINE)
    assert found and all(tuple(map(int, version.split("."))) <= NEWEST[kind] for kind, version in found)


def test_a_torch_without_cuda_says_so() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert compiled.status("cuda").load_error == "this torch is built without CUDA"


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), True), ((8, 6), True), ((7, 5), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)],
)
def test_which_devices_the_default_build_runs_on(capability: tuple[int, int], runs: bool) -> None:
    assert compiled.runs_on("8.0 9.0 10.0+PTX", capability) is runs


def test_machine_code_of_a_newer_device_does_not_run_on_an_older() -> None:
    assert not compiled.runs_on("8.6", (8, 0))
    assert not compiled.runs_on("9.0", (10, 0))
    assert compiled.runs_on("9.0+PTX", (10, 0))
    assert compiled.runs_on("9.0a", (9, 0))
