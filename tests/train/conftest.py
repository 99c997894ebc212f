"""What the trainer's tests have in common: a text, a finished two-rank run, and the command line in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from training import TINY, run_ranks, shortened, write_text  # noqa: E402
from zero_optim.cli import main  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class FinishedRun:
    """Two ranks, six steps, a checkpoint every three."""

    folder: Path
    text: Path
    output: str


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "source")


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, text: Path) -> FinishedRun:
    folder = tmp_path_factory.mktemp("two") / "run"
    flags = ["--steps", "6", "--save-every", "3", "--data", str(text), "--out", str(folder)]
    return FinishedRun(folder, text, run_ranks(2, [*TINY, *flags], folder.parent))


@pytest.fixture
def zero_optim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """``zero_optim(*arguments)`` runs the command line here, as one rank, in an empty folder; ``shortened`` unless it
    is ``whole``."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors; more threads would only wait for one another

    def run(*arguments: str | os.PathLike[str], whole: bool = False) -> Outcome:
        capfd.readouterr()
        with shortened(whole=whole):
            try:
                code = main([os.fspath(argument) for argument in arguments])
            except SystemExit as stop:
                code = int(stop.code or 0)
        return Outcome(code, *capfd.readouterr())

    yield run
    torch.set_num_threads(threads)
