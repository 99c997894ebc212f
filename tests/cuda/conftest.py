"""Looks into what nvcc makes, on a machine that need not have a GPU."""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import build_cache
import pytest
from library_cache import PTX, cached_library
from toolchain import PTX_ARCHS, ROOT, SOURCES


@pytest.fixture(scope="session")
def setup_py() -> SimpleNamespace:
    """The functions and flags of setup.py."""
    pytest.importorskip("setuptools", minversion="77")
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py"), run_name="setup"))


@pytest.fixture(scope="session")
def nvcc(setup_py: SimpleNamespace) -> str:
    found = setup_py.nvcc()
    if found is None:
        pytest.skip("nvcc is not here")
    return found


@pytest.fixture(scope="session")
def cuobjdump() -> Path:
    """CUDA's disassembler, as Triton's package carries it."""
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    if path is None or not path.exists():
        pytest.skip("cuobjdump is not here: pip install triton")
    return path


@pytest.fixture(scope="session")
def library(setup_py: SimpleNamespace, nvcc: str) -> Path:
    """The CUDA library of these sources, whether or not the package was installed with one."""
    try:
        return cached_library(setup_py, nvcc, build_cache.folder("cuda"))
    except setup_py.BuildError as failure:
        pytest.fail(str(failure))


@pytest.fixture(scope="session")
def ptx(library: Path) -> Mapping[tuple[str, str], Path]:
    """The PTX that each op's source became on the way to the library, by architecture and name."""
    places = {
        (arch, name): library.parent / PTX / f"{name}.compute_{arch}.ptx" for arch in PTX_ARCHS for name in SOURCES
    }
    return {of: place for of, place in places.items() if place.exists()}
