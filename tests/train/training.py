"""Runs ``zero-optim train`` on several ranks for the tests, and reads what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNDRAWN = Path(__file__).with_name("undrawn")
TIMEOUT_SECONDS = 90
TINY = ["--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "2", "--device", "cpu"]
TINY += ["--dtype", "bf16"]  # by default it depends on the hardware
ENDLESS = ["--steps", "4000"]  # far more than a test waits for, and still an end


def write_text(folder: Path) -> Path:
    """A few files of source text to train on, always the same."""
    folder.mkdir(exist_ok=True)
    for number in range(12):
        lines = [f"def f{number}_{k}(x):\n    return x * {k} + {number}\n" for k in range(20 + number)]
        (folder / f"part{number:02}.py").write_text("\n".join(lines))
    return folder


def environment() -> dict[str, str]:
    """This process's, with the source tree importable, no launcher's variables, no matplotlib and no TensorBoard."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = [str(UNDRAWN), str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def shortened(*, whole: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """A training in this process, which keeps its signal handlers; unless it is ``whole`` with a short sample, and with
    neither charts nor TensorBoard, which take seconds to import."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            patch.setattr("zero_optim.train.loop._SAMPLE_LENGTH", 20)
            for module in ("matplotlib", "torch.utils.tensorboard"):
                patch.setitem(sys.modules, module, None)
        yield patch
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Command:
    """A command of its own process, its output read line by line, ended after ``TIMEOUT_SECONDS`` at the latest.

    The output ends when the last process that can write to it is gone: ``finish`` returns only after every rank.
    """

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._watchdog = threading.Timer(TIMEOUT_SECONDS, self.process.terminate)
        self._watchdog.start()

    def read_until(self, part: str) -> str:
        """Reads on to the first line that holds ``part``, and returns that line."""
        for line in self.process.stdout:
            self.output += line
            if part in line:
                return line
        raise AssertionError(f"ended without {part!r}:\n{self.output}")

    def finish(self) -> int:
        self.output += self.process.stdout.read()
        code = self.process.wait()
        self._watchdog.cancel()
        return code


def train_ranks(ranks: int, arguments: Sequence[str], folder: Path) -> Command:
    return Command(["-m", "zero_optim", "train", "--ranks", str(ranks), *arguments], folder)


def run_ranks(ranks: int, arguments: Sequence[str], folder: Path) -> str:
    """Trains to the end; returns the output."""
    command = train_ranks(ranks, arguments, folder)
    assert command.finish() == 0, command.output
    return command.output


def read_log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def saved_steps(run: Path) -> list[int]:
    """Of the checkpoints that there are."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoint").glob("step-*"))


def table_row(output: str, name: str) -> list[float]:
    """The figures of a line of the final table."""
    row = re.search(rf"^  {name} +([\d., ]+)$", output, re.MULTILINE)
    assert row, output
    return [float(figure.replace(",", "")) for figure in row[1].split()]


def without_speed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that a repeated run must give again, bit for bit."""
    return [{name: value for name, value in record.items() if name not in ("tokens_per_s", "ms")} for record in records]
