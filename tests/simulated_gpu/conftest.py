"""The process that has the device, for the tests of the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulated_gpu import Unavailable, library
from simulated_gpu.worker import Call, worker


@pytest.fixture(scope="session")
def device() -> None:
    """There is a simulated device; else the test is skipped."""
    try:
        library()
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def call(device: None) -> Iterator[Call]:
    """Runs a function of the module, with its arguments, in the process: the result, and the races seen."""
    with worker() as run:
        yield run
