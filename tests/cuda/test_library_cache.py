"""The tests' own CUDA library is built once, whoever asks, and anew where anything that it depends on has changed."""

from __future__ import annotations

import fcntl
import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import kept
import library_cache
import pytest
from library_cache import cached_library, key

ROOT = Path(__file__).parents[2]


class Cache:
    """A cache in a folder of its own, for a copy of the sources, with a compiler that only counts."""

    def __init__(self, setup_py: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.folder, self.built = folder / "root", folder / "cache", []
        shutil.copytree(ROOT / "csrc", self.root / "csrc")
        shutil.copy(ROOT / "setup.py", self.root)
        self.torch = folder / "torch"
        self.torch.mkdir()
        (self.torch / "version.py").write_text("cuda = None\n")
        self.nvcc = folder / "nvcc"
        self.install_nvcc("13.0")
        overridden = {"build": self.build, "torch_directory": lambda: self.torch}
        self.setup_py = SimpleNamespace(**vars(setup_py) | overridden)
        monkeypatch.setattr(library_cache, "key", lambda *args: key(*args, root=self.root))

    def install_nvcc(self, version: str) -> None:
        self.nvcc.write_text(f"#!/bin/sh\necho release {version}\n")
        self.nvcc.chmod(0o755)

    def build(self, library: object, folder: Path) -> None:
        with (self.folder / "lock").open("w") as lock, pytest.raises(BlockingIOError):  # nobody else can build now
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.built.append(folder)
        folder.mkdir(exist_ok=True)
        (folder / library.file).write_text(f"build {len(self.built)}")

    def library(self) -> str:
        return cached_library(self.setup_py, str(self.nvcc), self.folder).read_text()


@pytest.fixture
def cache(setup_py: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return Cache(setup_py, tmp_path, monkeypatch)


def test_it_is_built_once_though_a_file_is_touched(cache: Cache) -> None:
    assert cache.library() == "build 1"
    (cache.root / "csrc/cuda/step_lion.cu").touch()
    assert cache.library() == "build 1"


@pytest.mark.parametrize("change", ["kernel", "header", "setup.py", "nvcc", "torch", "architectures", "compiler"])
def test_a_change_builds_it_anew(cache: Cache, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    assert cache.library() == "build 1"
    files = {"kernel": "root/csrc/cuda/step_lion.cu", "header": "root/csrc/rules/rule.h", "setup.py": "root/setup.py"}
    files["torch"] = "torch/version.py"
    if change in files:
        with (cache.folder.parent / files[change]).open("a") as file:
            file.write("\n")
    elif change == "nvcc":
        cache.install_nvcc("13.1")
    else:
        monkeypatch.setenv(*{"architectures": ("TORCH_CUDA_ARCH_LIST", "9.0"), "compiler": ("CXX", "clang++")}[change])
    assert cache.library() == "build 2"


def test_another_branch_finds_its_own_and_what_nobody_has_asked_for_longest_is_removed(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MOST", 2)

    def made_for(architecture: str) -> str:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architecture)
        return cache.library()

    assert [made_for(arch) for arch in ("8.0", "9.0", "8.0")] == ["build 1", "build 2", "build 1"]
    assert [made_for(arch) for arch in ("10.0", "8.0", "9.0")] == ["build 3", "build 1", "build 4"]


def test_checkouts_share_it_wherever_they_and_their_torch_are(cache: Cache) -> None:
    there = SimpleNamespace(**runpy.run_path(str(cache.root / "setup.py"), run_name="setup"))
    torch = Path(shutil.copytree(cache.torch, cache.root / "torch"))
    there.torch_directory = lambda: torch
    library = cache.setup_py.cuda_library(cache.torch)
    assert str(cache.root) in repr(there.cuda_library(torch)) and str(cache.root) not in repr(library)
    of_there = key(there, there.cuda_library(torch), str(cache.nvcc), root=cache.root)
    assert of_there == key(cache.setup_py, library, str(cache.nvcc), root=ROOT)


def test_workers_that_come_together_build_it_once(cache: Cache) -> None:
    with ThreadPoolExecutor(8) as workers:
        assert {future.result() for future in [workers.submit(cache.library) for _ in range(8)]} == {"build 1"}
    assert len(cache.built) == 1


def test_a_build_that_failed_counts_for_nothing_and_is_completed(cache: Cache) -> None:
    build = cache.setup_py.build

    def fail(library: object, folder: Path) -> None:
        build(library, folder)
        raise cache.setup_py.BuildError("no")

    cache.setup_py.build = fail
    with pytest.raises(cache.setup_py.BuildError):
        cache.library()
    cache.setup_py.build = build
    assert cache.library() == "build 2"
    assert cache.built[0] == cache.built[1]  # so that ninja keeps what it has
