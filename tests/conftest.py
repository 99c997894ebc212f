"""Session-wide set-up: shared helpers and benchmarks are importable, and no worker process outlives the session."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for _folder in (str(HERE.parent / "benchmarks"), str(HERE / "helpers"), str(HERE)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import uncollected  # noqa: E402, F401  (until all tests are collected)
from turns import take_turns  # noqa: E402

# Modules are compiled once, and kept. Where the environment forbids that, each of hundreds of processes compiles them
# again: to import torch and the package takes 8.8 seconds of a core in place of 3.3, and pytest rewrites all its files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# One thread, in this process and in all that it starts: several may share out the sums of a matmul, which gives other
# bits, and an oracle here must have those of the ranks. OpenMP reads this when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Where there is a worker for every core, each keeps to its own core, with all that it starts. Two ranks wake each other
# faster there: a small all-reduce of gloo takes 0.25 ms on one core, and 0.65 ms on two.
if sys.platform == "linux" and (_worker := os.environ.get("PYTEST_XDIST_WORKER")):
    _cores = sorted(os.sched_getaffinity(0))
    if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(_cores):
        os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})

take_turns()  # and all that it starts

# The loopback interface is always there; a host name that does not resolve would stop gloo.
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pytest_collection_finish() -> None:
    """The garbage collector works again."""
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """What hypothesis caches goes beside what pytest caches."""
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(config.rootpath, ".pytest_cache", "hypothesis")))


@pytest.fixture(scope="session", autouse=True)
def _rank_pool() -> Iterator[None]:
    yield
    if "harness" in sys.modules:
        sys.modules["harness"].close_pool()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: where several workers take a file at a time, none is left with one at the end."""
    seconds = {HERE / name: of_file for name, of_file in json.loads((HERE / "seconds.json").read_text()).items()}
    items.sort(key=lambda item: -seconds.get(item.path, 0.0))
