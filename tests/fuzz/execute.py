"""Runs programs on ranks: many in one group of the pool's for speed, or one alone on forked ranks for shrinking."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import multiprocessing
import os
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from simulated_gpu.switch import chosen

from fuzz import prelude
from fuzz.oracle import compare, expected
from fuzz.program import Program
from fuzz.script import text as text_of

Entries = list[tuple[Any, ...]]  # what a rank saw: (operation, values ...)

BATCH_SECONDS = 120.0  # beside the group's own time-out, of 20
ALONE_SECONDS = 6.0


@dataclass(frozen=True)
class Failure:
    """``kind`` is "differs", "raises", "hangs", or "in company": only after other programs."""

    program: Program
    kind: str
    message: str


def _compiled(program: Program, name: str) -> Callable[[int, int, Callable[..., None]], None]:
    names, source = dict(vars(prelude)), text_of(program)
    if chosen() is not None:
        names["own_sum"] = _own_sum_alone
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    exec(compile(source, name, "exec"), names)
    return names["program"]


def _own_sum_alone(value: float, rank: int) -> float:
    """``own_sum`` without a message. On a GPU a collective of the program's must not come before what completes a
    backward that raised; random programs have it anywhere."""
    return sum(value * (other + 1) for other in range(dist.get_world_size()))


def _run_batch(rank: int, world: int, programs: Sequence[Program]) -> list[Entries]:
    warnings.simplefilter("ignore")
    results = []
    for index, program in enumerate(programs):
        entries: Entries = []
        try:
            _compiled(program, f"<program {index}>")(rank, world, lambda *seen, to=entries: to.append(seen))
        except BaseException as error:
            raise RuntimeError(f"program {index}, after {len(entries)} operations") from error
        results.append(entries)
    dist.barrier()
    return results


def run_batch(programs: Sequence[Program]) -> list[Failure]:
    """Programs of one world size, one after another in one process group. What raises is looked at alone."""
    try:
        one_order = all(len(program.optims) == 1 for program in programs)  # else ranks may come to them in any order
        by_rank = run_ranks(programs[0].world, _run_batch, list(programs), timeout=BATCH_SECONDS, one_order=one_order)
    except RankFailure as error:
        text = str(error)
    else:
        return _differences(programs, by_rank)
    alone = [failure for program in programs if (failure := run_alone(program))]
    return alone or [Failure(programs[-1], "in company", f"alone none of these fails:\n{programs!r}\n{text}")]


def _differences(programs: Sequence[Program], by_rank: list[list[Entries]]) -> list[Failure]:
    failures = []
    for index, program in enumerate(programs):
        seen = [entries[index] for entries in by_rank]
        if message := compare(program, expected(program), seen):
            failures.append(Failure(program, "differs", message))
    return failures


def run_alone(program: Program, seconds: float = ALONE_SECONDS) -> Failure | None:
    """One program on forked ranks, as a script would run it."""
    if chosen() is not None:  # a forked rank has no simulation
        return _run_simulated(program)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(program.world)]
    run = _compiled(program, "<program>")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        ranks = [
            context.Process(target=_child, args=(rank, program.world, directory, run, pipes[rank][1]), daemon=True)
            for rank in range(program.world)
        ]
        for process in ranks:
            process.start()
        for _, there in pipes:
            there.close()
        results = _collect([here for here, _ in pipes], ranks, seconds)
        stacks = [_stack(process, Path(directory, f"stack-{rank}")) for rank, process in enumerate(ranks)]
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
    return _judge(program, results, [process.exitcode for process in ranks], stacks)


def _run_simulated(program: Program) -> Failure | None:
    try:
        one_order = len(program.optims) == 1
        by_rank = run_ranks(program.world, _run_batch, [program], timeout=BATCH_SECONDS, one_order=one_order)
    except RankFailure as error:
        return Failure(program, "raises", str(error))
    return next(iter(_differences([program], by_rank)), None)


def _stack(process: BaseProcess, file: Path) -> str:
    """Where a rank hangs, in short; empty: it does not."""
    if process.pid is None or not process.is_alive() or not file.exists():
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and process.is_alive() and not file.read_text().endswith("in _child\n"):
        process.join(0.02)
    frames = re.findall(r'File ".*?([^/"]*)", line (\d+) in (\w+)', file.read_text())
    shown = [f"{name}:{line} {function}" for name, line, function in frames if "site-packages" not in name]
    return " < ".join(shown[:12])


def _child(rank: int, world: int, directory: str, run: Callable[..., None], pipe: Any) -> None:
    entries: Entries = []
    faulthandler.register(signal.SIGUSR1, file=open(Path(directory, f"stack-{rank}"), "w"))  # noqa: SIM115  to the end

    def see(*seen: Any) -> None:
        entries.append(seen)
        pipe.send(("at", len(entries)))

    def done(rank: int, error: str | None) -> None:
        pipe.send(("done", (error, entries)))

    try:
        prelude.child(rank, world, directory, run, see, 60.0, done)
    except BaseException:
        pipe.send(("done", (prelude.brief(), entries)))


def _busy(process: BaseProcess) -> bool:
    """Whether a thread of it could run: on a loaded machine that is no hang."""
    states = []
    for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # that thread has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return any(state in "RD" for state in states)


def _collect(pipes: list[Any], ranks: list[Any], seconds: float) -> list[tuple[int, Any]]:
    """For each rank how many operations it saw, and what it was done with, if it was.

    A hang is ``seconds`` without an operation, at whose end no rank could run.
    """
    results: list[tuple[int, Any]] = [(0, None)] * len(pipes)
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    last = time.monotonic() + 10 * seconds
    failed = False
    deadline = time.monotonic() + seconds
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and (time.monotonic() >= last or not any(map(_busy, ranks))):
            break
        deadline = time.monotonic() + (2 if failed else seconds if ready else 0.5)
        for pipe in ready:
            rank = open_pipes[pipe]
            try:
                word, value = pipe.recv()
            except (EOFError, OSError):
                word, value = "done", ("died", [])
            if word == "at":
                results[rank] = (value, None)
                continue
            results[rank] = (results[rank][0], value)
            del open_pipes[pipe]
            failed = failed or value[0] is not None  # the others have a little time for errors of their own
    return results


def _judge(
    program: Program, results: list[tuple[int, Any]], codes: list[int | None], stacks: list[str]
) -> Failure | None:
    errors = {rank: value[0] for rank, (_, value) in enumerate(results) if value is not None and value[0]}
    reached = ", ".join(f"rank {rank} at operation {at}" for rank, (at, _) in enumerate(results))
    if errors:
        texts = "\n".join(f"rank {rank} (exit code {codes[rank]}): {error}" for rank, error in errors.items())
        standing = "".join(f"\nrank {rank} at {stack}" for rank, stack in enumerate(stacks) if stack)
        return Failure(program, "raises", f"{reached}\n{texts}{standing}")
    if any(value is None for _, value in results):
        standing = "".join(f"\nrank {rank}: {stack}" for rank, stack in enumerate(stacks) if stack)
        return Failure(program, "hangs", reached + standing)
    message = compare(program, expected(program), [value[1] for _, value in results])
    return Failure(program, "differs", message) if message else None


def check(program: Program) -> None:
    """Raises AssertionError where a program, alone, does other than it should."""
    torch.set_num_threads(1)
    if failure := run_alone(program):
        raise AssertionError(f"{failure.kind}: {failure.message}\n{program!r}")
