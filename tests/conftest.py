"""Session-wide set-up: shared helpers and benchmarks are importable, and no worker process outlives the session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for _folder in (str(HERE.parent / "benchmarks"), str(HERE)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

# One thread, in this process and in all that it starts: several may share out the sums of a matmul, which gives other
# bits, and an oracle here must have those of the ranks. OpenMP reads this when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Where there is a worker for every core, each keeps to its own core, with all that it starts. Two ranks wake each other
# faster there: a small all-reduce of gloo takes 0.25 ms on one core, and 0.65 ms on two.
if sys.platform == "linux" and (_worker := os.environ.get("PYTEST_XDIST_WORKER")):
    _cores = sorted(os.sched_getaffinity(0))
    if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(_cores):
        os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})

# The loopback interface is always there; a host name that does not resolve would stop gloo.
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pytest_configure(config: pytest.Config) -> None:
    """What hypothesis caches goes beside what pytest caches."""
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(config.rootpath, ".pytest_cache", "hypothesis")))


@pytest.fixture(scope="session", autouse=True)
def _rank_pool() -> Iterator[None]:
    yield
    if "harness" in sys.modules:
        sys.modules["harness"].close_pool()


LONGEST = (
    "simulated_gpu/test_order_programs.py",
    "train/test_train_ranks.py",
    "gpu_check/test_gpu_check.py",
    "grads/test_interrupted_programs.py",
    "checkpoint/test_kills.py",
    "checkpoint/test_checkpoint_programs.py",
    "cuda/test_machine_code.py",
    "units/test_shard_module_models.py",
    "triton_backend/test_code.py",
    "units/test_stage3_parity.py",
    "triton_backend/test_bits.py",
    "face/test_parity.py",
    "face/test_training_properties.py",
    "fuzz/test_random_programs_of_the_face.py",
    "stores/test_store_programs.py",
    "checkpoint/test_dcp.py",
    "checkpoint/test_any_to_any.py",
    "checkpoint/test_whole_models.py",
    "train/test_example.py",
    "clients/test_example_scripts.py",
    "train/test_train_sharded.py",
    "cuda/test_bodies.py",
    "grads/test_ready_often.py",
    "grads/test_frozen_and_growing.py",
    "face/test_random_programs.py",
    "face/test_exit_with_an_error.py",
)
"""The files that take twenty seconds and more from a clean checkout, the longest first. All others take less."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: where several workers take a file at a time, none is left with one at the end."""
    place = {HERE / name: number for number, name in enumerate(LONGEST)}
    assert all(path.exists() for path in place), "a file of LONGEST is not there"
    items.sort(key=lambda item: place.get(item.path, len(place)))
