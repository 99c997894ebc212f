"""Makes the shared helpers importable, skips this folder where there is no CUDA device, and tells the run's seed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "kernels", HERE.parents[1] / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import places  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``ZERO_KERNELS_GPU_TESTS_PART=2/4`` takes every fourth test, from the second on: so four processes share them."""
    number, _, count = os.environ.get("ZERO_KERNELS_GPU_TESTS_PART", "1/1").partition("/")
    kept = items[int(number) - 1 :: int(count)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    reason = places.why_no_device()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _tell_the_seed() -> None:
    print(f"ZERO_KERNELS_GPU_TESTS_SEED={places.SEED}")
