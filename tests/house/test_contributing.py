"""CONTRIBUTING.md names every file, so that a newcomer finds where a change goes; read from the source tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIM = ROOT / "python" / "zero_optim"
CONTRIBUTING = re.sub(r"^```.*?^```", "", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL | re.MULTILINE)
ROOMS = sorted(path.parent.name for path in OPTIM.glob("*/__init__.py"))
ELSEWHERE = ("bench", "train")  # rooms whose files the docstring of the package names, as their row says


def _row(first: str) -> str:
    """The row of a table whose first cell is that."""
    rows = [line for line in CONTRIBUTING.splitlines() if line.startswith(f"| `{first}` |")]
    assert len(rows) == 1, f"{len(rows)} rows for {first}"
    return rows[0]


def _quoted(text: str) -> set[str]:
    return set(re.findall(r"`+([^`]+)`+", text))


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _modules(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_of_a_room_is_named(room):
    more = _docstring(OPTIM / room / "__init__.py") if room in ELSEWHERE else ""
    assert not _modules(OPTIM / room) - _quoted(_row(f"{room}/") + more)


def test_every_file_outside_of_the_rooms_is_named():
    assert not _modules(OPTIM) - {name.removesuffix(".py") for name in _quoted(CONTRIBUTING)}


def test_every_file_of_the_ops_is_named():
    assert not _modules(ROOT / "zero_kernels") - _quoted(_row("zero_kernels/"))


def test_every_header_that_cpu_and_cuda_share_is_named():
    assert not {path.name for path in (ROOT / "csrc").glob("*.h")} - _quoted(_row("csrc/"))


def test_every_folder_of_tests_is_named():
    assert not {f"{path.parent.name}/" for path in (ROOT / "tests").glob("*/*.py")} - _quoted(_row("tests/"))


def test_every_page_of_the_docs_is_named():
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == set(re.findall(r"\(docs/(\w+\.md)\)", _row("docs/")))
