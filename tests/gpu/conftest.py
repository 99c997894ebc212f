"""Prints the run's seed."""

from __future__ import annotations

import places
import pytest


@pytest.fixture(autouse=True)
def _print_the_seed() -> None:
    print(f"ZERO_KERNELS_GPU_TESTS_SEED={places.SEED}")
