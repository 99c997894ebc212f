"""One thread for the kernel tests: other work on the machine makes small parallel loops slow. Some ask for more."""

from collections.abc import Iterator

import pytest
from kernel_cases import threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield
