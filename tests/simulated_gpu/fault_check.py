"""Seeds one fault after another into a copy of ``zero_optim``, and looks whether the simulations find it.

``python -m simulated_gpu.fault_check [name ...]``, in ``tests``: a line for each fault of the table, or for those whose
names hold one of the words; exit code 1 where one is not caught, or where a program is wrong without any fault.
"""

from __future__ import annotations

import simulated_gpu.switch as simulation  # first of all: a simulated GPU has to be there before torch

# isort: split
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import zero_optim  # noqa: F401  this process keeps the package without faults
from harness import RankFailure, RankPool
from order_programs import OrderProgram, Trained, check, train
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simulated_gpu import Unavailable, host_access, library
from simulated_gpu.faults import FAULTS, PACKAGE, UNSEEN, Edit, Fault

TESTS = Path(__file__).resolve().parents[1]
COLLECTIVE_SECONDS = 8  # ranks that start on a busy machine take that long to meet
PROGRAM_SECONDS = 60  # with the start of a rank, on a busy machine
CAUGHT = ("race", "numbers", "error")


@dataclass(frozen=True)
class Verdict:
    """What has come of a fault.

    ``outcome``: "race": a simulation has reported one. "numbers": other results than one process has without streams.
    "error": another exception on some rank, ``text`` says which. "time-out": nothing but that. "missed": nothing.
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
    with _seeded(fault.edits) as source, _environment(source, fault.simulation, fault.debug):
        found, pool = MISSED, RankPool(fault.simulation)
        try:
            for program in fault.programs:
                found = _of_program(pool, program, fault.ranks)
                if found.caught and fault.shows in found.text:
                    return found
        finally:
            pool.close()
    return replace(found, outcome="missed") if found.caught else found


def unfaulted(faults: Sequence[Fault]) -> list[str]:
    """The programs of these faults that are wrong without a fault, each with what is wrong. Raises Unavailable.

    But for those of which a fault says what else its report must show.
    """
    library()
    told = []
    pools: dict[tuple[str, str], RankPool] = {}
    cases = dict.fromkeys((f.simulation, f.debug, f.ranks, f.shows, program) for f in faults for program in f.programs)
    try:
        for simulated, debug, ranks, shows, program in cases:
            with _environment(PACKAGE.parent, simulated, debug):
                found = _of_program(pools.setdefault((simulated, debug), RankPool(simulated)), program, ranks)
            if found.outcome != MISSED.outcome and (not shows or shows in found.text):
                told.append(f"{simulated}: {found.outcome}: {found.text}")
    finally:
        for pool in pools.values():
            pool.close()
    return told


def _of_program(pool: RankPool, program: OrderProgram, ranks: int) -> Verdict:
    try:
        results = pool.run(ranks, run_program, (program,), PROGRAM_SECONDS)
    except RankFailure as failure:
        return _of_failure(program, str(failure))
    wrong = check(results, program)
    return Verdict("numbers", wrong) if wrong else MISSED


def _of_failure(program: OrderProgram, text: str) -> Verdict:
    if "simulated_gpu.streams.Races:" in text or "simulated_gpu.held.Race:" in text:
        return Verdict("race", f"{program}: {text}")
    raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
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
            edit.apply(copy)
        yield Path(folder)


@contextlib.contextmanager
def _environment(source: Path, simulated: str, debug: str = "") -> Iterator[None]:
    """Of processes that are started within: they import the package in ``source``."""
    path = [str(source), str(PACKAGE.parents[1]), str(TESTS)]
    given = {
        "PYTHONPATH": os.pathsep.join(path),
        simulation.VARIABLE: simulated,
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


# ---- on a rank -------------------------------------------------------------------------------------------------------


def run_program(rank: int, world_size: int, program: OrderProgram) -> Trained:
    """On the simulated GPU, or on the CPU where none is."""
    chosen = simulation.chosen()
    if chosen is None or chosen.kind != "streams":
        return train(rank, world_size, program, torch.device("cpu"))
    with _HostWatch(), _host_copies_told():
        return train(rank, world_size, program, torch.device("cuda", 0))


class _HostWatch(TorchDispatchMode):
    """Tells the device where an operator on the CPU reads or writes pinned memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]
        if any(not t.is_cuda and t.numel() and t.is_pinned() for t in tensors) and not any(t.is_cuda for t in tensors):
            name, write = func._schema.name, func._schema.is_mutable
            for tensor in tensors:
                if tensor.is_pinned():
                    host_access(tensor, write and tensor is tensors[0], name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _host_copies_told() -> Iterator[None]:
    """The package reads a HostCopy past torch, so it is told apart."""
    from zero_optim.comm.host_copy import HostCopy

    read = HostCopy.read

    def told(copy: HostCopy, *, wait: bool) -> list[float] | None:
        values = read(copy, wait=wait)
        if values is not None and not copy.immediate:
            host_access(copy._host, False, "HostCopy.read")
        return values

    HostCopy.read = told
    try:
        yield
    finally:
        HostCopy.read = read


def check_faults(words: Sequence[str]) -> tuple[int, int, list[str]]:
    """Print a line for each fault whose name holds one of the words, or for all. How many were caught, of how many, and
    what was wrong without a fault."""
    seen = [fault for fault in FAULTS if fault.name not in UNSEEN]
    chosen = [fault for fault in seen if not words or any(word in fault.name for word in words)]
    try:
        wrong = unfaulted(chosen)
    except Unavailable as missing:
        return 0, len(chosen), [f"the simulated GPU: {missing.reason}"]
    for text in wrong:
        print(f"without a fault: {text}")
    caught = 0
    for fault in chosen:
        start = time.perf_counter()
        found = verdict(fault)
        caught += found.caught
        seconds = time.perf_counter() - start
        print(f"{found.outcome:8} {seconds:4.1f} s  {fault.name}: {_in_a_line(found.text)}", flush=True)
    print(f"{len(UNSEEN)} waits that no program shows are in the table with their reasons")
    return caught, len(chosen), wrong


def main(words: Sequence[str]) -> int:
    caught, seeded, wrong = check_faults(words)
    print(f"{caught} of {seeded} seeded faults caught")
    return int(caught < seeded or bool(wrong))


def _in_a_line(text: str) -> str:
    """The race or the exception itself, without the stack before it."""
    lines = text.splitlines()
    told = [line for line in lines if "Race" in line and ":" in line and "raise" not in line]
    return f"{lines[0].partition(': rank')[0]}: {(told or lines)[0].strip()}"[:220] if told else lines[0][:220]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
