"""What hypothesis caches goes beside what pytest caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(config.rootpath, ".pytest_cache", "hypothesis")))
