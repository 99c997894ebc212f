"""Runs the tests that are nearest to a change, in 90 seconds at most: ``make quick``.

A change is what differs from the commit at which this branch left BASE, with the files that git does not know yet. Its
tests are in the folders that mirror what it touches, and in those of MORE. They are taken a file at a time, as long as
there is room by the times in ``seconds.json``: first the files of tests that were changed themselves, then those with
the name of a changed module, then the quickest. What finds no room is named in the last line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
SECONDS = TESTS / "seconds.json"  # of a core for every file of tests, from a clean checkout; see `measured`
WORKERS = 2
ROOM = 60.0  # seconds for each worker; to start, collect and begin ranks takes 15
UNKNOWN = 5.0  # seconds of a file that was never measured

MORE: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Whoever adds a file or an import learns whether its room may have it.
    ("python/zero_optim/", ("house/test_imports.py", "house/test_contributing.py")),
    # The face is what joins the rooms, and has no room of its own.
    (r"python/zero_optim/\w+\.py$", ("face",)),
    ("python/zero_optim/engine.py", ("step",)),
    ("python/zero_optim/(cli|doctor).py", ("train/test_doctor.py",)),
    ("python/zero_optim/integrations/", ("clients",)),
    # Rooms whose mistakes show in the bits of a training before they show in a test of their own.
    ("python/zero_optim/(comm|grads|step|rules|params)/", ("face/test_parity.py",)),
    ("python/zero_optim/(params|units)/", ("units/test_stage3_parity.py",)),
    ("python/zero_optim/stores/", ("stores/test_trajectories.py",)),
    # The backends have one specification, so a change of one is compared with the others.
    ("zero_kernels/", ("kernels",)),
    ("zero_kernels/triton/", ("triton_backend",)),
    ("csrc/", ("kernels", "cuda")),
    ("setup.py", ("cuda/test_setup.py",)),
    ("benchmarks/(?!gpu_)", ("bench",)),
    ("benchmarks/gpu_", ("gpu_check",)),
    ("examples/", ("clients/test_example_scripts.py", "clients/test_nanogpt_example.py")),
    # Pages whose programs are run.
    ("docs/zero3.md", ("train/test_zero3_doc.py",)),
    ("docs/moving.md", ("clients/test_moving.py",)),
    # The engine of random programs, by its quickest family.
    ("tests/programs/", ("units/test_part_programs.py",)),
    ("tests/checkpoint_programs/", ("checkpoint/test_checkpoint_programs.py",)),
    ("tests/warm_python/", ("house/test_warm_python.py",)),
    ("tests/helpers/", ("rules/test_muon_in_float64.py",)),
    ("tests/(harness|conftest|quick).py|tests/seconds.json", ("house",)),
)
"""How a path begins, as a regular expression, and which tests it has beside those of its folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the tests that are nearest to a change")
    parser.add_argument("--base", default="main", help="a change is what differs from where this branch left it (main)")
    parser.add_argument("--measured", type=Path, metavar="XML", help="of a whole run: write its times, and run nothing")
    options, of_pytest = parser.parse_known_args(arguments)
    if options.measured is not None:
        SECONDS.write_text(json.dumps(measured(options.measured), indent=1) + "\n")
        return 0
    paths = changed(options.base)
    taken, left = choose(tests_of(paths), paths, seconds())
    print(f"{len(paths)} changed files have {len(taken) + len(left)} files of tests", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", f"-n{WORKERS}", "--dist=loadfile", "--no-loadscope-reorder", "-x"]
    code = subprocess.run([*command, *of_pytest, *(str(TESTS / name) for name in taken)], cwd=ROOT).returncode
    print(f"left out for their time: {', '.join(left) or 'none of them'}; `make test` runs all")
    return code


def changed(base: str) -> list[str]:
    """Paths from the root, as git writes them; a file that was removed is one of them."""
    known = [name for name in (base, f"origin/{base}") if _git("rev-parse", "--verify", "--quiet", name)]
    since = _git("merge-base", "HEAD", known[0]) if known else ["HEAD"]
    return sorted({*_git("diff", "--name-only", *since), *_git("ls-files", "--others", "--exclude-standard")})


def _git(*words: str) -> list[str]:
    """The lines that git prints; none where it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def tests_of(paths: Iterable[str]) -> list[str]:
    """Files of tests, as paths from ``tests``; those of ``house`` where no path has any."""
    names = {name for path in paths for name in (*_mirrored(path), *_more(path))}
    files = {file for name in names for file in _files(TESTS / name)} or _files(TESTS / "house")
    return sorted(file.relative_to(TESTS).as_posix() for file in files)


def _more(path: str) -> list[str]:
    return [name for beginning, names in MORE if re.match(beginning, path) for name in names]


def _mirrored(path: str) -> list[str]:
    """The folder of tests that has the name of the room; of a file in ``tests``, itself or those beside it."""
    first, *others = path.split("/")
    if path.startswith("python/zero_optim/") and len(others) > 2:
        return [others[1]]
    if first != "tests":
        return []
    if len(others) == 1:
        return [file.relative_to(TESTS).as_posix() for file in _importers(Path(path).stem)]
    return ["/".join(others)] if Path(path).name.startswith("test_") else [others[0]]


def _importers(module: str) -> list[Path]:
    """The files of tests that import a helper."""
    imports = re.compile(rf"^(?:from|import) {re.escape(module)}\b", re.MULTILINE)
    return [file for file in TESTS.glob("*/test_*.py") if imports.search(file.read_text())]


def _files(path: Path) -> list[Path]:
    """Those of a folder, or the file itself; none where a file is no longer there."""
    return sorted(path.glob("test_*.py")) if path.is_dir() else [path] if path.exists() else []


def choose(files: Iterable[str], paths: Sequence[str], times: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """The files that there is room for, and those that there is none for."""
    modules = {Path(path).stem for path in paths}

    def order(file: str) -> tuple[int, float]:
        named = any(f"test_{module}" in file for module in modules)
        return (0 if f"tests/{file}" in paths else 1 if named else 2), times.get(file, UNKNOWN)

    taken, left, room = [], [], WORKERS * ROOM
    for file in sorted(files, key=order):
        needs = times.get(file, UNKNOWN)
        if needs <= min(room, ROOM):
            room -= needs
            taken.append(file)
        else:
            left.append(file)
    return taken, left


def seconds() -> dict[str, float]:
    """By file of tests, as a path from ``tests``; the longest first."""
    return json.loads(SECONDS.read_text())


def measured(xml: Path) -> dict[str, float]:
    """As ``seconds``, from what ``make test ARGS=--junitxml=XML`` has written."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        file = "/".join(case.attrib["classname"].split(".")[1:3]) + ".py"
        found[file] = found.get(file, 0.0) + float(case.attrib["time"])
    return {file: round(time, 1) for file, time in sorted(found.items(), key=lambda item: -item[1])}


if __name__ == "__main__":
    sys.exit(main())
