"""Runs programs on ranks: many in one process group of the pool's for speed, or one alone on forked ranks for
shrinking."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from simulated_gpu.switch import chosen

from programs import world
from programs.family import Entries, Failure, Family

START_SECONDS = 30.0  # of a batch, beside what its programs take, and the group's own time-out of 20
ALONE_SECONDS = 6.0


def execute(text: str, name: str, names: dict[str, Any]) -> dict[str, Any]:
    """The names of a program's text after it was run; tracebacks show its lines. ``name``: <like this>."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)
    return names


# Many in one group


def _run_batch(rank: int, world_size: int, family: Family, programs: Sequence[Any], folder: str) -> list[Entries]:
    """``programs``: of each its job that is to run now."""
    warnings.simplefilter("ignore")
    results: list[Entries] = []
    for index, program in enumerate(programs):
        Path(folder, f"at-{rank}").write_text(str(index))
        entries: Entries = []
        try:
            family.run(program, rank, _files(folder, index), lambda *seen, to=entries: to.append(seen))
        except BaseException as error:
            raise RuntimeError(f"program {index}, after {len(entries)} operations") from error
        results.append(entries)
    dist.barrier()
    return results


def seen_in_batch(family: Family, programs: Sequence[Any], folder: str) -> list[list[Entries]]:
    """What each rank of each job saw of each program. Raises RankFailure."""
    seconds = START_SECONDS + family.seconds * len(programs)
    by_rank: list[list[Entries]] = []
    for jobs in zip(*map(family.jobs, programs), strict=True):
        world_size, one_order = family.world(jobs[0]), all(map(family.one_order, jobs))
        for rank in range(world_size):
            Path(folder, f"at-{rank}").write_text("0")
        by_rank += run_ranks(world_size, _run_batch, family, jobs, folder, timeout=seconds, one_order=one_order)
    return [list(seen) for seen in zip(*by_rank, strict=True)]


def _files(folder: str, index: int) -> str:
    """What ``Family.run`` is given."""
    path = Path(folder, f"files-{index}")
    path.mkdir(exist_ok=True)
    return str(path)


def run_batch(family: Family, programs: Sequence[Any]) -> Iterator[Failure]:
    """Programs of the same world sizes, one after another in one process group. One that raises or hangs ends the
    group: then each is looked at alone, and that one first."""
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        try:
            seen = seen_in_batch(family, programs, folder)
        except RankFailure as error:
            at, text = _reached(folder), str(error)
        else:
            yield from _differences(family, programs, seen)
            return
    company = Failure(programs[at], "in company", f"alone it does not fail:\n{[*programs[: at + 1]]!r}\n{text}")
    yield run_alone(family, programs[at]) or company
    for program in (*programs[:at], *programs[at + 1 :]):
        if failure := run_alone(family, program):
            yield failure


def _reached(folder: str) -> int:
    """The first program that not every rank of the last job has gone past; those of jobs before have gone past all."""
    return min(int(file.read_text() or 0) for file in Path(folder).glob("at-*"))


def _differences(family: Family, programs: Sequence[Any], seen: list[list[Entries]]) -> Iterator[Failure]:
    judged = [(program, family.verdict(program, of)) for program, of in zip(programs, seen, strict=True)]
    return (Failure(program, family.kind("differs", text), text) for program, text in judged if text)


# One alone


def run_alone(family: Family, program: Any, seconds: float = ALONE_SECONDS) -> Failure | None:
    """One program on forked ranks, as a script would run it."""
    if chosen():  # a forked rank has no simulation
        return _run_simulated(family, program)
    seen: list[Entries] = []
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        for job in family.jobs(program):
            outcome, found = _run_job(family, job, _files(folder, 0), seconds)
            if outcome:
                return Failure(program, family.kind(outcome, found), found)
            seen += found
    return next(_differences(family, [program], [seen]), None)


def _run_job(family: Family, job: Any, files: str, seconds: float) -> tuple[str, Any]:
    """ "raises" or "hangs", and in words how; or what each rank saw."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(family.world(job))]
    with tempfile.TemporaryDirectory(prefix="programs-") as directory:
        ranks = [
            context.Process(target=_child, args=(rank, len(pipes), directory, files, family, job, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
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
    return _outcome(results, [process.exitcode for process in ranks], stacks)


def check(family: Family, program: Any) -> None:
    """Raises AssertionError where a program, alone, does other than it should."""
    torch.set_num_threads(1)
    if failure := run_alone(family, program):
        raise AssertionError(f"{failure.kind}: {failure.message}\n{program!r}")


def _run_simulated(family: Family, program: Any) -> Failure | None:
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        try:
            seen = seen_in_batch(family, [program], folder)
        except RankFailure as error:
            return Failure(program, family.kind("raises", str(error)), str(error))
    return next(_differences(family, [program], seen), None)


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


def _child(rank: int, world_size: int, directory: str, files: str, family: Family, job: Any, pipe: Any) -> None:
    entries: Entries = []
    faulthandler.register(signal.SIGUSR1, file=open(Path(directory, f"stack-{rank}"), "w"))  # noqa: SIM115  to the end

    def say(word: str, value: Any) -> None:
        pipe.send_bytes(pickle.dumps((word, value)))  # ``send`` would leave the values of tensors with this process

    def see(*seen: Any) -> None:
        entries.append(seen)
        say("at", len(entries))

    def run(rank: int, _: int, see: Any) -> None:
        family.run(job, rank, files, see)

    def done(rank: int, error: str | None) -> None:
        say("done", (error, entries))

    try:
        world.child(rank, world_size, directory, run, see, 60.0, done)
    except BaseException:
        say("done", (world.brief(), entries))


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
                word, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                word, value = "done", ("died", [])
            if word == "at":
                results[rank] = (value, None)
                continue
            results[rank] = (results[rank][0], value)
            del open_pipes[pipe]
            failed = failed or value[0] is not None  # the others have a little time for errors of their own
    return results


def _outcome(results: list[tuple[int, Any]], codes: list[int | None], stacks: list[str]) -> tuple[str, Any]:
    errors = {rank: value[0] for rank, (_, value) in enumerate(results) if value is not None and value[0]}
    reached = ", ".join(f"rank {rank} at operation {at}" for rank, (at, _) in enumerate(results))
    if errors:
        texts = "\n".join(f"rank {rank} (exit code {codes[rank]}): {error}" for rank, error in errors.items())
        standing = "".join(f"\nrank {rank} at {stack}" for rank, stack in enumerate(stacks) if stack)
        return "raises", f"{reached}\n{texts}{standing}"
    if any(value is None for _, value in results):
        standing = "".join(f"\nrank {rank}: {stack}" for rank, stack in enumerate(stacks) if stack)
        return "hangs", reached + standing
    return "", [value[1] for _, value in results]
