"""What the Makefile installs before it runs a target, and what it says meanwhile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("requirements.txt", "requirements-dev.txt")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone that nothing was made in."""
    for name in ("Makefile", "setup.py", "pyproject.toml", *FILES):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def planned(checkout: Path, target: str) -> list[str]:
    """The commands that make would run. Under `make test`, make is a child of make, and would name its directory."""
    command = ["make", "--no-print-directory", "--dry-run", *target.split()]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.splitlines()


@needs_make
@pytest.mark.parametrize("target", ["train", "bench", "doctor"])
def test_training_and_measuring_install_nothing_for_tests(checkout: Path, target: str) -> None:
    commands = "\n".join(planned(checkout, target))
    assert "--requirement requirements.txt" in commands and "requirements-dev.txt" not in commands


@needs_make
@pytest.mark.parametrize("target", ["test", "fuzz", "race-check", "cuda-check", "lint", "format"])
def test_testing_installs_both_once(checkout: Path, target: str) -> None:
    commands = "\n".join(planned(checkout, target))
    assert [commands.count(f"--requirement {name}") for name in FILES] == [1, 1]
    for stamp in ("installed", "built", "developed"):
        (checkout / ".venv").mkdir(exist_ok=True)
        (checkout / ".venv" / stamp).touch()
    assert "pip" not in "\n".join(planned(checkout, target))


@needs_make
def test_training_takes_the_dtype_that_suits_the_hardware(checkout: Path) -> None:
    assert "--dtype" not in planned(checkout, "train")[-1]
    assert "--dtype fp16" in planned(checkout, "train DTYPE=fp16")[-1]


def test_a_package_is_pinned_in_one_place() -> None:
    pins = {name: re.findall(r"^([\w-]+)==", (ROOT / name).read_text(), re.MULTILINE) for name in FILES}
    assert pins["requirements.txt"] and pins["requirements-dev.txt"]
    assert not set(pins["requirements.txt"]) & set(pins["requirements-dev.txt"])
    assert "--requirement requirements.txt\n" in (ROOT / "requirements-dev.txt").read_text()
