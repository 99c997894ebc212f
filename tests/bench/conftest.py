"""What the benchmark's tests share: the command line in this process, in an empty folder, on one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from zero_optim.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str], capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """``bench(*arguments)`` runs ``zero-optim bench`` here."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | os.PathLike[str]) -> Outcome:
        capsys.readouterr()
        try:
            code = main(["bench", *map(os.fspath, arguments)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run
