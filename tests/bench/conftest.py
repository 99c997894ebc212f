"""What the benchmark's tests share: the command line in this process, in an empty folder, on one thread."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


Run = Callable[..., Outcome]


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str], capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[list[str]], int]], Run]:
    """``run_here(program)``: a function that runs it with its arguments, here."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)

    def of(program: Callable[[list[str]], int]) -> Run:
        def run(*arguments: str | os.PathLike[str]) -> Outcome:
            capsys.readouterr()
            try:
                code = program([*map(os.fspath, arguments)])
            except SystemExit as stop:
                code = int(stop.code or 0)
            return Outcome(code, *capsys.readouterr())

        return run

    return of


@pytest.fixture
def bench(run_here: Callable[..., Run]) -> Run:
    """``bench(*arguments)`` runs ``zero-optim bench`` here."""
    return run_here(lambda arguments: main(["bench", *arguments]))


@pytest.fixture
def refuses(bench: Run) -> Callable[..., None]:
    """``refuses(*arguments, saying=parts)``: they end it with one line that has the parts, and nothing is written."""

    def check(*arguments: str, saying: Sequence[str], by: Run = bench) -> None:
        before = sorted(Path().iterdir())
        outcome = by(*arguments)
        begins = outcome.err.startswith(("zero-optim", "bench_"))
        assert outcome.code == 2 and outcome.err.count("\n") == 1 and begins, outcome
        assert all(part in outcome.err for part in saying), outcome.err
        assert sorted(Path().iterdir()) == before

    return check


@pytest.fixture
def ran(run_here: Callable[..., Run]) -> Callable[..., tuple[Outcome, list[dict[str, Any]]]]:
    """``ran(main, *arguments)`` runs a script. Returns its outcome, and the rows of its only file, which has a plot."""

    def run(main: Callable[[list[str]], int], *arguments: str) -> tuple[Outcome, list[dict[str, Any]]]:
        pytest.importorskip("matplotlib")
        outcome = run_here(main)(*arguments, "--out", ".")
        assert outcome.code == 0, outcome.err
        (file,) = Path().glob("*.json")
        assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return outcome, json.loads(file.read_text())["rows"]

    return run
