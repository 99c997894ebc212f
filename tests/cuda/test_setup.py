"""How setup.py finds nvcc and what it builds for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def places(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Folders for an nvcc, none of which has one yet: CUDA_HOME, the PATH, where CUDA installs itself."""
    found = {name: tmp_path / name for name in ("home", "path", "usual")}
    for folder in (found["home"] / "bin", found["path"], found["usual"]):
        folder.mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(found["home"]))
    monkeypatch.setenv("PATH", str(found["path"]))
    monkeypatch.setitem(setup_py.nvcc.__globals__, "USUAL_CUDA", str(found["usual"]))
    return {"home": found["home"] / "bin", "path": found["path"], "usual": found["usual"]}


def test_nvcc_is_looked_for_in_three_places(setup_py: SimpleNamespace, places: dict[str, Path]) -> None:
    assert setup_py.nvcc() is None
    for name in ("usual", "path", "home"):  # each goes before the one that was there
        (places[name] / "nvcc").write_text("#!/bin/sh\n")
        (places[name] / "nvcc").chmod(0o755)
        assert setup_py.nvcc() == str(places[name] / "nvcc")


def test_without_nvcc_the_rest_is_built(
    setup_py: SimpleNamespace, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(setup_py.build_all.__globals__, "build", lambda library, folder: folder / library.file)
    built = setup_py.build_all(tmp_path)
    assert isinstance(built["cpu"], Path)
    assert built["cuda"] == "nvcc was not found in CUDA_HOME, on the PATH or in /usr/local/cuda\n"


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ("9.0", ["arch=compute_90,code=sm_90"]),
        ("8.0;9.0a", ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a"]),
        ("10.0+PTX", ["arch=compute_100,code=sm_100", "arch=compute_100,code=compute_100"]),
    ],
)
def test_architectures_are_written_as_torch_takes_them(
    setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, asked: str, flags: list[str]
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert setup_py.arch_flags() == [word for flag in flags for word in ("-gencode", flag)]


def test_the_default_is_three_architectures_and_ptx(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert setup_py.cuda_archs() == ["8.0", "9.0", "10.0+PTX"]


def test_a_wrong_architecture_is_named(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "hopper")
    with pytest.raises(setup_py.BuildError, match="'hopper' is no architecture"):
        setup_py.arch_flags()
