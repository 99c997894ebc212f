"""Tests of kernels run wherever something that they depend on has changed since ``make cuda-check``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checked
import pytest


@pytest.fixture(autouse=True)
def _not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(checked.ALWAYS, raising=False)


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho release 13.0\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What machine code depends on, and its tests."""
    for folder in ("csrc", "zero_kernels", "tests/cuda", "tests/kernels", "tests/triton_backend"):
        shutil.copytree(checked.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(checked.ROOT / "setup.py", tmp_path)
    return tmp_path


def test_a_copy_of_the_sources_has_been_checked_as_well(root: Path, nvcc: Path) -> None:
    assert checked.of_cuda(str(nvcc), root) == checked.of_cuda(str(nvcc))


@pytest.mark.parametrize(
    "change",
    [
        "csrc/cuda/pack.cu",
        "csrc/types.h",
        "csrc/rules/adamw.h",
        "setup.py",
        "tests/cuda/toolchain.py",
        "tests/cuda/host/pack.cpp",
        "zero_kernels/reference.py",
        "nvcc",
    ],
)
def test_a_change_has_cuda_checked_again(root: Path, nvcc: Path, tmp_path: Path, change: str) -> None:
    before = checked.of_cuda(str(nvcc), root)
    (tmp_path / "record.json").write_text(json.dumps({"cuda": before}))
    assert checked.is_checked("cuda", before, tmp_path / "record.json")
    with (root / change).open("a") as file:
        file.write("\n" if change != "nvcc" else "echo more\n")
    assert not checked.is_checked("cuda", checked.of_cuda(str(nvcc), root), tmp_path / "record.json")


@pytest.mark.parametrize(
    "change",
    [
        "zero_kernels/triton/common.py",
        "zero_kernels/codecs.py",
        "tests/triton_backend/test_code.py",
        "tests/kernels/cases.py",
    ],
)
def test_a_change_has_triton_checked_again(root: Path, change: str) -> None:
    pytest.importorskip("triton")
    before = checked.of_triton(root)
    with (root / change).open("a") as file:
        file.write("\n")
    assert checked.of_triton(root) != before


def test_nothing_is_skipped_where_nothing_is_on_record_or_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    record.write_text("{}")
    assert not checked.is_checked("triton", "name", record)
    record.write_text(json.dumps({"triton": "name"}))
    assert checked.is_checked("triton", "name", record)
    monkeypatch.setenv(checked.ALWAYS, "1")
    assert not checked.is_checked("triton", "name", record)
