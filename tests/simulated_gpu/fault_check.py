"""Seeds one fault after another into a copy of ``zero_optim``, and looks whether the simulations find it.

``python -m simulated_gpu.fault_check [name ...]``, in ``tests``: a line for each fault of the table, or for those whose
names hold one of the words; exit code 1 where one is not caught, or where a program is wrong without any fault.
"""

from __future__ import annotations

import simulated_gpu.switch  # noqa: F401  first of all: a simulated GPU has to be there before torch

# isort: split
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zero_optim  # noqa: F401  this process keeps the package without faults
from harness import RankFailure, RankPool
from order_programs import OrderProgram, wrong

from simulated_gpu import Unavailable, library
from simulated_gpu.faults import FAULTS, PACKAGE, Edit, Fault
from simulated_gpu.programs import train_all
from simulated_gpu.transport import RaceFound

TESTS = Path(__file__).resolve().parents[1]
COLLECTIVE_SECONDS = 8  # ranks that start on a busy machine take that long to meet
PROGRAM_SECONDS = 60  # with the start of a rank, on a busy machine
CAUGHT = ("race", "numbers", "error")
NO_PYTHON = ("SyntaxError", "IndentationError", "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")


@dataclass(frozen=True)
class Verdict:
    """What has come of a fault.

    ``outcome``: "race": a simulation has reported one. "numbers": other results than one process has without streams.
    "error": another exception on some rank, ``text`` says which. "time-out": nothing but that. "missed": nothing.
    "broken": the fault is no Python that runs.
    """

    outcome: str
    text: str

    @property
    def caught(self) -> bool:
        """A time-out alone may have any cause."""
        return self.outcome in CAUGHT


MISSED = Verdict("missed", "all its programs are right")


def verdict(fault: Fault) -> Verdict:
    """Run the programs of the fault until one of them tells something. Raises Unavailable."""
    if fault.simulation.startswith("streams"):
        library()
    with _seeded(fault.edits) as source, _environment(source, fault.debug):
        found, pool = MISSED, RankPool(fault.simulation)
        try:
            for program in fault.programs:
                found = _of_program(pool, program, fault.ranks)
                if found.caught:
                    break
        finally:
            pool.end()
    return found


def unfaulted(faults: Sequence[Fault]) -> list[str]:
    """The programs of these faults that are wrong without a fault, each with what is wrong. Raises Unavailable."""
    library()
    told = []
    pools: dict[tuple[str, str], RankPool] = {}
    cases = dict.fromkeys((f.simulation, f.debug, f.ranks, program) for f in faults for program in f.programs)
    try:
        for simulated, debug, ranks, program in cases:
            with _environment(PACKAGE.parent, debug):
                found = _of_program(pools.setdefault((simulated, debug), RankPool(simulated)), program, ranks)
            if found.outcome != MISSED.outcome:
                told.append(f"{simulated}: {found.outcome}: {found.text}")
    finally:
        for pool in pools.values():
            pool.end()
    return told


def _of_program(pool: RankPool, program: OrderProgram, ranks: int) -> Verdict:
    try:
        by_rank = pool.run(ranks, train_all, ([program],), PROGRAM_SECONDS)
    except RankFailure as failure:
        return _of_failure(program, str(failure))
    found = wrong(by_rank, [program])
    return Verdict("numbers", found[0]) if found else MISSED


def _of_failure(program: OrderProgram, text: str) -> Verdict:
    if f"{RaceFound.__module__}.{RaceFound.__name__}:" in text:
        return Verdict("race", f"{program}: {text}")
    raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    if any(line.startswith(NO_PYTHON) for line in raised):
        return Verdict("broken", f"{program}: {text}")
    # gloo's words where another rank has left, "[file:line] Timed out" or "Connection closed", follow from the cause.
    hung = [line for line in raised if "CollectiveError" in line or "imed out" in line or "onnection closed" in line]
    others = [line for line in raised if line not in hung and not line.startswith("RuntimeError: [")]
    if others:
        return Verdict("error", f"{program}: {others[0]}\n{text}")
    return Verdict("time-out", f"{program}: {text}")


@contextlib.contextmanager
def _seeded(edits: Sequence[Edit]) -> Iterator[Path]:
    """A folder with a copy of the package, edited."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder, PACKAGE.name)
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in edits:
            path = copy / edit.file
            path.write_text(edit.applied_to(path.read_text()))
        yield Path(folder)


@contextlib.contextmanager
def _environment(source: Path, debug: str) -> Iterator[None]:
    """Of processes that are started within: they import the package in ``source``."""
    path = [str(source), str(PACKAGE.parents[1]), str(TESTS)]
    given = {
        "PYTHONPATH": os.pathsep.join(path),
        "ZERO_OPTIM_DEBUG": debug,
        "GLOO_TIMEOUT_SECONDS": str(COLLECTIVE_SECONDS),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
        "ZERO_KERNELS_BACKEND": "reference",
    }
    before, search = {name: os.environ.get(name) for name in given}, list(sys.path)
    os.environ.update(given)
    sys.path[:0] = path  # a process that is spawned begins with this one's
    try:
        yield
    finally:
        sys.path[:] = search
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_faults(words: Sequence[str]) -> tuple[int, int, list[str]]:
    """Print a line for each fault whose name holds one of the words; without words, for all that some program shows.

    Returns how many were caught, of how many, and what is wrong beside that.
    """
    named = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    seen = [fault for fault in FAULTS if not fault.unseen]
    chosen = named or seen
    if words and not named:
        return 0, 0, [f"no fault has one of {list(words)} in its name"]
    try:
        found_before = unfaulted(chosen)
    except Unavailable as missing:
        return 0, len(chosen), [f"the simulated GPU: {missing}"]
    for text in found_before:
        print(f"without a fault: {text}")
    caught = 0
    for fault in chosen:
        start = time.perf_counter()
        found = verdict(fault)
        caught += found.caught
        seconds = time.perf_counter() - start
        print(f"{found.outcome:8} {seconds:4.1f} s  {fault.name}: {_in_a_line(found.text)}", flush=True)
    if not words:
        print(f"{len(FAULTS) - len(seen)} waits that no program shows are in the table with their reasons")
    return caught, len(chosen), found_before


def main(words: Sequence[str]) -> int:
    caught, seeded, found = check_faults(words)
    print("\n".join([*found, f"{caught} of {seeded} seeded faults caught"]))
    return int(caught < seeded or bool(found))


def _in_a_line(text: str) -> str:
    """The race or the exception itself, without the stack before it."""
    lines = text.splitlines()
    told = [line for line in lines if "RaceFound" in line and ":" in line and "raise" not in line]
    return f"{lines[0].partition(': rank')[0]}: {(told or lines)[0].strip()}"[:220] if told else lines[0][:220]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
