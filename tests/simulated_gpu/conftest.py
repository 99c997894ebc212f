"""The process that has the device, for the tests of the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulated_gpu import Unavailable, library
from simulated_gpu.worker import Call, worker


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Runs a function of the module, with its arguments, in the process: the result, and the races seen."""
    try:
        library()
    except Unavailable as missing:
        pytest.skip(missing.reason)
    with worker() as run:
        yield run
