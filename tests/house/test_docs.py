"""The pages: their links and anchors are there, and their snippets parse."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCES.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_what_it_links_to_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", FENCES.sub("", page.read_text())):
        if re.match(r"\w+://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_its_snippets_parse(page: Path) -> None:
    for language, code in FENCES.findall(page.read_text()):
        if language == "python":
            ast.parse(code)
        elif language == "sh" and (bash := shutil.which("bash")):
            subprocess.run([bash, "-n"], input=code, text=True, check=True)


def test_pages_that_the_code_names_are_there() -> None:
    trees = ("python", "zero_kernels", "csrc", "tests", "examples")
    files = [file for tree in trees for kind in ("py", "cpp", "cu", "h") for file in (ROOT / tree).rglob(f"*.{kind}")]
    for file in files:
        for page in re.findall(r"docs/\w[\w-]*\.md", file.read_text()):
            assert (ROOT / page).exists(), f"{file}: {page}"
