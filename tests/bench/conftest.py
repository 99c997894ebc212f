"""What the benchmark's tests share: the command line in this process, in an empty folder, on one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
def draws_again(bench: Callable[..., Outcome]) -> Callable[[Outcome, Path, Path], None]:
    """``draws_again(first, file, plot)``: from the file alone come the plot, and the table of the first run.

    The sheets are made, and not drawn a second time: ``report/test_bench_page.py`` draws what comes from files.
    """

    def check(first: Outcome, file: Path, plot: Path) -> None:
        plot.unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zero_optim.bench.plot.png", lambda sheet, path: path.touch())
            again = bench("--redraw", file)
        assert again.code == 0 and plot.exists()
        assert again.out.splitlines()[:-1] == first.out.splitlines()[:-2]

    return check


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
