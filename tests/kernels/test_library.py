"""The compiled library: what it needs from torch, and how it is chosen and built."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from kernel_cases import ISAS
from stable_abi import check_stable_abi, needs_nm

from zero_kernels import compiled

ROOT = Path(__file__).parents[2]

needs_library = pytest.mark.skipif(not ISAS, reason="the CPU library is not built")


def test_the_library_is_built_unless_that_was_declined() -> None:
    status = compiled.status()
    if status.build_error and status.build_error.startswith("ZERO_KERNELS_NO_BUILD"):
        pytest.skip(status.build_error)
    assert status.loaded, status.build_error or status.load_error
    assert status.isas[-1] == "scalar" and status.isa in status.isas


@needs_library
@needs_nm
def test_only_the_stable_abi_is_needed() -> None:
    check_stable_abi(compiled.library("cpu"), "torch_parallel_for")


@needs_library
def test_the_environment_forces_an_instruction_set() -> None:
    """In processes that have torch, and nothing of the package."""
    code = """if 1:
        import os, torch
        for isa in ("scalar", "mmx"):
            if os.fork() == 0:
                os.environ["ZERO_KERNELS_ISA"] = isa
                from zero_kernels import compiled
                status = compiled.status()
                print(status.isa, status.load_error, flush=True)
                os._exit(0)
            os.wait()
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    scalar, unknown = done.stdout.splitlines()
    assert scalar == "scalar None"
    assert unknown.startswith("None instruction set 'mmx' is not usable here; usable: ")


@pytest.fixture
def setup_py() -> Path:
    pytest.importorskip("setuptools", minversion="77")
    return ROOT / "setup.py"


def build(setup_py: Path, tmp_path: Path, **environment: str) -> tuple[Path, subprocess.CompletedProcess]:
    package = tmp_path / "lib/zero_kernels"
    package.mkdir(parents=True, exist_ok=True)
    (package / compiled.library("cpu").name).write_text("left by an earlier build")
    command = [sys.executable, str(setup_py), "build_ext", "-b", str(tmp_path / "lib"), "-t", str(tmp_path / "temp")]
    environment = os.environ | {"ZERO_KERNELS_NO_CUDA": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return package, done


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({"CXX": "/bin/false"}, r"\$ /bin/false -std=[^\n]*\.o\n"),
        ({"CXX": "/no/such/compiler -x"}, r"\$ /no/such/compiler -x [^\n]*\.o\n[^\n]*not found\n"),
        ({"CXX": "sh -c 'echo syntax error >&2; exit 3'"}, r"\$ sh [^\n]*\nsyntax error\n"),
        ({"ZERO_KERNELS_NO_BUILD": "1"}, "ZERO_KERNELS_NO_BUILD was set: the library was not built\n"),
    ],
    ids=["failing", "missing", "speaking", "declined"],
)
def test_a_build_that_fails_keeps_the_first_error(
    setup_py: Path, tmp_path: Path, environment: dict, error: str
) -> None:
    package, done = build(setup_py, tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in package.iterdir()) == ["build_error_cpu.txt", "build_error_cuda.txt"]
    kept = (package / "build_error_cpu.txt").read_text()
    assert re.fullmatch(error, kept, re.DOTALL), kept
    assert kept.strip() in done.stdout + done.stderr


def test_status_reads_the_kept_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "build_error_cpu.txt").write_text("$ c++\nno\n")
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    monkeypatch.setattr(compiled, "why_unusable", compiled.why_unusable.__wrapped__)
    status = compiled.status()
    assert (status.loaded, status.path, status.isa, status.isas) == (False, None, None, ())
    assert status.build_error == "$ c++\nno\n"
    assert "libzero_kernels_cpu.so is not there" in status.load_error


def test_a_broken_library_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libzero_kernels_cpu.so").write_text("not a library")
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    monkeypatch.setattr(compiled, "why_unusable", compiled.why_unusable.__wrapped__)
    assert "libzero_kernels_cpu.so can't be loaded" in compiled.status().load_error


# As pip's isolation does it: the environment's packages leave sys.path, the build's own come in.
SETUP_REQUIRES = """
import runpy, sys
sys.path[:] = [sys.argv[2], *(path for path in sys.path if not path.endswith("-packages"))]
import setuptools
setuptools.setup = lambda **keywords: print(keywords["setup_requires"])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_an_isolated_build_asks_for_torch_only_where_there_is_none(setup_py: Path, tmp_path: Path) -> None:
    import setuptools

    site_packages = Path(setuptools.__file__).parents[1]
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (tools / name).symlink_to(site_packages / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    interpreters = {tmp_path / "empty/bin/python": "['torch>=2.10']"}
    if Path(torch.__file__).parents[1] == Path(sysconfig.get_paths()["purelib"]):
        interpreters[Path(sys.executable)] = "[]"
    for interpreter, want in interpreters.items():
        command = [str(interpreter), "-I", "-c", SETUP_REQUIRES, str(setup_py), str(tools)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.strip() == want, done.stderr
