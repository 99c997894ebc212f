"""Fresh processes that form a group, gloo or NCCL, and run a function on each rank; time there.

What they print, packages included, goes to temporary files. A failure comes back as an exception.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from zero_optim.bench.timing import Clock, Job, make_clock
from zero_optim.errors import ZeroOptimError

LIMIT_SECONDS = 600.0
COLLECTIVE_SECONDS = 60.0
IMPORTED = ["zero_optim", "torch.distributed.fsdp", "torch._dynamo"]  # before the fork: memory is counted from there
GRACE_SECONDS = 5.0  # once a rank has failed, for the others to report their own errors


class RanksError(ZeroOptimError):
    """A rank raised, died or took too long. The message is the error of the lowest rank that has one."""


@dataclass(frozen=True)
class _Place:
    """The rank's number, where it meets the others, and the threads and device that it may use."""

    rank: int
    count: int
    folder: Path
    port: int
    threads: int
    device: str = "cpu"

    @property
    def log(self) -> Path:
        return self.folder / f"rank-{self.rank}.log"


def on_ranks(count: int, work: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """Run ``work(*args)`` on ``count`` ranks. Returns the results in rank order. ``work`` is a function of a module.

    The ranks share the threads that torch has here. On ``cuda`` each has a GPU, its current device. Raises RanksError.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    port, threads = _free_port(), max(1, torch.get_num_threads() // count)
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        places = [_Place(rank, count, Path(folder), port, threads, device) for rank in range(count)]
        connections: list[Connection] = []
        processes: list[BaseProcess] = []
        for place in places:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(there, place, work, args), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            processes.append(process)
        try:
            return _collect(places, connections)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(places: Sequence[_Place], connections: Sequence[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    pending = dict(zip(connections, places, strict=True))
    deadline = time.monotonic() + LIMIT_SECONDS
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(pending), timeout=left)
        for connection in [connection for connection in pending if connection in ready]:
            place = pending.pop(connection)
            try:
                ok, value = connection.recv()
            except EOFError:
                ok, value = False, f"the process died; it last said {_last_line(place.log)!r}"
            (results if ok else errors)[place.rank] = value
            if not ok:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if errors:
        rank = min(errors)
        raise RanksError(f"rank {rank}: {errors[rank]}")
    if pending:
        raise RanksError(f"rank {next(iter(pending.values())).rank} had not finished after {LIMIT_SECONDS:.0f} s")
    return [results[place.rank] for place in places]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def _rank_main(connection: Connection, place: _Place, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with place.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    gc.freeze()  # imported objects are no garbage, and looking through them takes half a second
    torch.set_num_threads(place.threads)
    _set_environment(place)
    try:
        if place.device == "cuda":
            torch.cuda.set_device(place.rank)
        dist.init_process_group(
            "nccl" if place.device == "cuda" else "gloo",
            init_method=f"file://{place.folder / 'store'}",
            rank=place.rank,
            world_size=place.count,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        answer = (True, work(*args))
    except Exception as error:
        answer = (False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    connection.send(answer)
    connection.close()
    os._exit(0)  # at once: threads and groups that packages leave behind could block or crash an ordinary exit


def _set_environment(place: _Place) -> None:
    """Set what torchrun sets, for packages that read it."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.count),
        "LOCAL_WORLD_SIZE": str(place.count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- time --------------------------------------------------------------------------------------------------------------


class TogetherClock(Clock):
    """A clock that starts when all ranks have met and each device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._clock, self._device = make_clock(device), device
        self.warm_up_seconds = 0.0  # ranks must agree on how many rounds there are

    def time(self, job: Job) -> Callable[[], list[float]]:
        dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the previous job has ended on every stream
        return self._clock.time(job)


def of_the_slower(of_ranks: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, list[list[float]]]:
    """Take the laps of the slowest rank in each round, for each job."""
    return {
        name: [max(of_round, key=sum) for of_round in zip(*(times[name] for times in of_ranks), strict=True)]
        for name in of_ranks[0]
    }
