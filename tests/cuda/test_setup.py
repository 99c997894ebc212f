"""When setup.py builds the CUDA library, how it finds nvcc, and what it builds for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


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


def put_nvcc(folder: Path) -> None:
    (folder / "nvcc").write_text("#!/bin/sh\n")
    (folder / "nvcc").chmod(0o755)


def test_nvcc_is_looked_for_in_three_places(setup_py: SimpleNamespace, places: dict[str, Path]) -> None:
    assert setup_py.nvcc() is None
    for name in ("usual", "path", "home"):  # each goes before the one that was there
        put_nvcc(places[name])
        assert setup_py.nvcc() == str(places[name] / "nvcc")


WITHOUT_CUDA = "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
WITH_CUDA = "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
LEFT_OUT = {
    "no nvcc": "nvcc was not found in CUDA_HOME, on the PATH or in /usr/local/cuda\n",
    "no use": "this torch has no CUDA, so the library was left out: install a torch with CUDA, "
    "or set ZERO_KERNELS_CUDA=1, then install this package again\n",
    "declined": "ZERO_KERNELS_NO_CUDA was set: the library was not built\n",
}


# Whether there is an nvcc; torch's version file; the environment; why the library is left out.
BUILDS = {
    "both": (True, WITH_CUDA, {}, None),
    "both, forced": (True, WITH_CUDA, {"ZERO_KERNELS_CUDA": "1"}, None),
    "torch without": (True, WITHOUT_CUDA, {}, "no use"),
    "torch without, not forced": (True, WITHOUT_CUDA, {"ZERO_KERNELS_CUDA": "0"}, "no use"),
    "torch without, forced": (True, WITHOUT_CUDA, {"ZERO_KERNELS_CUDA": "1"}, None),
    "torch without a version": (True, "", {}, "no use"),
    "no nvcc": (False, WITH_CUDA, {}, "no nvcc"),
    "neither": (False, WITHOUT_CUDA, {}, "no nvcc"),
    "neither, forced": (False, WITHOUT_CUDA, {"ZERO_KERNELS_CUDA": "1"}, "no nvcc"),
    "declined": (True, WITH_CUDA, {"ZERO_KERNELS_NO_CUDA": "1"}, "declined"),
    "declined and forced": (True, WITH_CUDA, {"ZERO_KERNELS_NO_CUDA": "1", "ZERO_KERNELS_CUDA": "1"}, "declined"),
}


@pytest.mark.parametrize(("found", "version", "asked", "left_out"), BUILDS.values(), ids=BUILDS)
def test_the_cuda_library_is_built_where_nvcc_and_torch_have_cuda_or_it_is_asked_for(
    setup_py: SimpleNamespace,
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: bool,
    version: str,
    asked: dict[str, str],
    left_out: str | None,
) -> None:
    if found:
        put_nvcc(places["path"])
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(version)
    monkeypatch.setitem(setup_py.build_all.__globals__, "torch_directory", lambda: tmp_path / "torch")
    monkeypatch.setitem(setup_py.build_all.__globals__, "build", lambda library, folder: folder / library.file)
    for name in ("ZERO_KERNELS_CUDA", "ZERO_KERNELS_NO_CUDA", "ZERO_KERNELS_NO_BUILD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    built = setup_py.build_all(tmp_path)
    assert built["cpu"] == tmp_path / "cpu" / setup_py.library_file("cpu")
    expected = LEFT_OUT[left_out] if left_out else tmp_path / "cuda" / setup_py.library_file("cuda")
    assert built["cuda"] == expected


def test_the_torch_that_runs_is_seen_as_it_sees_itself(setup_py: SimpleNamespace) -> None:
    assert setup_py.has_cuda(Path(torch.__file__).parent) == (torch.version.cuda is not None)


def test_a_torch_without_a_version_has_no_cuda(setup_py: SimpleNamespace, tmp_path: Path) -> None:
    assert not setup_py.has_cuda(tmp_path)


@pytest.mark.parametrize(
    ("reason", "asked", "warned"),
    [("no use", "0", False), ("no nvcc", "0", False), ("no nvcc", "1", True), ("declined", "0", False)],
)
def test_a_library_that_was_left_out_is_no_warning_unless_it_was_asked_for(
    setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, asked: str, warned: bool
) -> None:
    from setuptools import Distribution

    monkeypatch.setenv("ZERO_KERNELS_CUDA", asked)
    (tmp_path / "built").touch()
    built = {"cpu": tmp_path / "built", "cuda": LEFT_OUT[reason]}
    monkeypatch.setitem(setup_py.build_all.__globals__, "build_all", lambda folder: built)
    command = setup_py.BuildLibraries(Distribution())
    command.editable_mode, command.build_temp, command.build_lib = False, str(tmp_path), str(tmp_path / "lib")
    said: list[str] = []
    monkeypatch.setattr(command, "warn", said.append)
    command.build_extension(None)
    assert (tmp_path / "lib/zero_kernels/build_error_cuda.txt").read_text() == LEFT_OUT[reason]
    assert [LEFT_OUT[reason] in line for line in said] == [True] * warned


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ("9.0", ["arch=compute_90,code=[sm_90]"]),
        ("8.0;9.0a", ["arch=compute_80,code=[sm_80]", "arch=compute_90a,code=[sm_90a]"]),
        ("10.0+PTX", ["arch=compute_100,code=[sm_100,compute_100]"]),
        ("9.0+PTX 8.6", ["arch=compute_86,code=[sm_90,sm_86]", "arch=compute_90,code=[compute_90]"]),
        ("7.5 8.0", ["arch=compute_75,code=[sm_75]", "arch=compute_80,code=[sm_80]"]),
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
    flags = ["-gencode", "arch=compute_80,code=[sm_80,sm_90]", "-gencode", "arch=compute_100,code=[sm_100,compute_100]"]
    assert setup_py.arch_flags() == flags


def test_a_wrong_architecture_is_named(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "hopper")
    with pytest.raises(setup_py.BuildError, match="'hopper' is no architecture"):
        setup_py.arch_flags()
