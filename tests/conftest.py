"""Session-wide set-up: the shared helpers are importable, and no worker process outlives the session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

# One thread, in this process and in all that it starts: several may share out the sums of a matmul, which gives other
# bits, and an oracle here must have those of the ranks. OpenMP reads this when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# The loopback interface is always there; a host name that does not resolve would stop gloo.
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="session", autouse=True)
def _rank_pool() -> Iterator[None]:
    yield
    if "harness" in sys.modules:
        sys.modules["harness"].close_pool()
