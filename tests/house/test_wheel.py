"""``make wheel``: one file for every Linux, Python and torch that are supported; it needs no compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHES = os.environ.get("ZERO_KERNELS_WHEEL_TORCHES", "2.13.0").split()
"""Versions to try. Only one has a wheel for CPUs on PyPI's mirrors; name others where an index has them."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the wheel is for Linux")]


@pytest.fixture(scope="module")
def wheel() -> Path:
    if shutil.which("make") is None or shutil.which("c++") is None:
        pytest.skip("make and a C++ compiler build it")
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0"}  # tests/cuda compiles for all, which takes minutes
    subprocess.run(["make", "-C", str(ROOT), "wheel"], env=environment, check=True, capture_output=True, text=True)
    return max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)


def test_it_is_one_file_for_all(wheel: Path) -> None:
    assert re.fullmatch(r"zero_kernels-.*-py3-none-manylinux_2_28_x86_64\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "zero_kernels/libzero_kernels_cpu.so" in names
    assert ("zero_kernels/libzero_kernels_cuda.so" in names) == (shutil.which("nvcc") is not None)
    assert not [name for name in names if ".libs/" in name]  # torch brings what they are linked with
    assert list((ROOT / "dist").glob("zero_kernels-*.tar.gz"))


@pytest.mark.parametrize("torch", TORCHES)
def test_it_trains_in_an_empty_environment_without_a_compiler(wheel: Path, torch: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    bin = tmp_path / "env" / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ZERO_"))}
    install = [str(bin / "pip"), "install", "--quiet", f"torch=={torch}", str(wheel)]
    done = subprocess.run(install, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment["PATH"] = str(bin)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert re.search(r"on cpu tensors +cpu \(", run(str(bin / "zero-optim"), "doctor"))
    shutil.copy(ROOT / "examples" / "muon.py", tmp_path)
    torchrun = [str(bin / "python"), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "Muon has 3 matrices" in run(*torchrun, "muon.py", "--steps", "3")
