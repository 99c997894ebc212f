"""Session-wide set-up: threads, cores and interfaces of what tests start; no worker process outlives the session."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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

# A process that is woken waits until the running one has to wait itself; so do all that this one starts. By default
# gloo's sender, which holds a lock while it wakes another rank, then spins for that lock: a third of the processor time
# of tests with ranks (Linux 6.18, two to four ranks on a core of an EPYC).
if sys.platform == "linux":
    with contextlib.suppress(OSError):  # a sandbox may not have it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# The loopback interface is always there; a host name that does not resolve would stop gloo.
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pytest_configure(config: pytest.Config) -> None:
    """What hypothesis caches goes beside what pytest caches."""
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(config.rootpath, ".pytest_cache", "hypothesis")))


_LONG = ("train", "clients", "bench", "checkpoint", "face")  # folders whose files take minutes


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first, so that workers end together. Skip tests of a GPU where there is none.

    ``ZERO_KERNELS_GPU_TESTS_PART=2/4`` takes every fourth of these, from the second on, so that four processes run all.
    """
    items.sort(key=lambda item: item.path.parent.name not in _LONG)
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    number, _, count = os.environ.get("ZERO_KERNELS_GPU_TESTS_PART", "1/1").partition("/")
    left_out = {*of_gpu} - {*of_gpu[int(number) - 1 :: int(count)]}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if of_gpu:
        import places

        if (reason := places.why_no_device()) is not None:
            for item in of_gpu:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _rank_pool() -> Iterator[None]:
    yield
    if "harness" in sys.modules:
        sys.modules["harness"].close_pool()
