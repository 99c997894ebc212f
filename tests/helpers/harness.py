"""Runs test functions on ranks: a pool of spawned processes, reused over the session, in which nothing can hang.

``run_ranks(world_size, fn, *args)`` calls ``fn(rank, world_size, *args)`` on every rank and returns the results in rank
order. ``fn`` is a module-level function; arguments and results travel by pickle. Each call has its own process group,
over gloo on the CPU, or over NCCL where a call asks for it: its ranks then share the GPUs there are.
"""

from __future__ import annotations

import simulated_gpu.switch as simulation  # first of all: a simulated GPU has to be there before torch

# isort: split
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = {  # of a collective; ranks that share a GPU take turns on it
    "gloo": int(os.environ.get("GLOO_TIMEOUT_SECONDS", "20")),
    "nccl": 40,
}
PRELOADED = [
    "harness",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
    "zero_optim",
]
GRACE_SECONDS = 5  # for the other ranks to report, once one has failed
TAIL = 4000  # characters of what a failed rank wrote to stderr


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time. The message holds what every rank was doing."""


@dataclass(frozen=True)
class _Task:
    """What a rank is asked to do. ``call`` is pickled apart: its modules are found through ``sys_path``."""

    rank: int
    world_size: int
    port: int  # of the pool's store
    name: str  # of the call, in that store
    sys_path: tuple[str, ...]
    call: bytes
    backend: str
    bound: bool
    collective_timeout: timedelta


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    stack_file: Path
    error_file: Path


def _take_gpu(rank: int) -> torch.device:
    """Make a GPU the current one: the one of the rank's number, or one that it shares with other ranks."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # read from NCCL 2.30 on
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # ranks on one GPU can't have it
    device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device


@functools.cache
def _store(port: int) -> dist.TCPStore:
    """The store that the pool serves: a file's readers ask every 10 ms whether what they wait for is there."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


_ENDED: queue.Queue[list[dist.ProcessGroup]] = queue.Queue()  # groups of calls before


def _let_go() -> None:
    """Ends process groups, while the next call runs: gloo waits 10 ms for each connection."""
    while True:
        groups = _ENDED.get()
        del groups
        _ENDED.task_done()


def await_ended_groups() -> None:
    """On a rank: until the process groups of calls before are gone, with their threads and files."""
    _ENDED.join()


@contextlib.contextmanager
def _process_group(task: _Task):
    store = _store(task.port)
    store.set_timeout(task.collective_timeout)
    device = _take_gpu(task.rank) if task.backend == "nccl" else None
    dist.init_process_group(
        task.backend,
        store=dist.PrefixStore(task.name, store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=task.collective_timeout,
        device_id=device if task.bound else None,
    )
    # Else a rank that has connected, and does nothing with it, leaves while others are connecting: they fail (seen).
    dist.barrier()
    try:
        yield
    finally:
        gc.collect()  # work handles and hooks of this call go before the group does
        gc.freeze()  # what survives is modules: the next collection need not walk them (60 ms on one core)
        _ENDED.put(list(dist.distributed_c10d._world.pg_map))
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers meshes of calls before, whose groups are gone, and takes them for those of the next."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _perform(task: _Task) -> tuple[bool, Any]:
    sys.path.extend(path for path in task.sys_path if path not in sys.path)
    try:
        fn, args = pickle.loads(task.call)
        gc.freeze()  # what is imported is neither garbage nor a module of the program's: nobody need walk it
        with _process_group(task), simulation.running() as issued:
            return True, (fn(task.rank, task.world_size, *args), issued)  # a list, which fills up as the context ends
    except BaseException:
        return False, traceback.format_exc()


class _Pickler(pickle.Pickler):
    """Tensors of a GPU travel as those of a CPU, and a whole tensor as its bytes: to pickle a storage and to load it
    takes torch 0.2 ms (a Xeon core), and some tests return 50,000 tensors."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if thing.is_cuda:
            thing = thing.detach().cpu()
        elif type(thing) is torch.nn.Parameter:
            return NotImplemented
        if not _owns_its_memory(thing):
            return thing.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return _of_bytes, (ctypes.string_at(thing.data_ptr(), thing.nbytes), thing.dtype, tuple(thing.shape))


def _owns_its_memory(tensor: torch.Tensor) -> bool:
    """Whether these are plain values, and all of a storage."""
    plain = (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.__dict__ or tensor.is_conj())
    )
    return plain and not tensor.is_neg() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _of_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _dumps(value: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


def _worker_main(connection: Connection, stack_file: str, error_file: str) -> None:
    with open(error_file, "ab", buffering=0) as errors:
        os.dup2(errors.fileno(), 2)  # what libraries and a dying process say, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session's process handles Ctrl-C and closes the pool
    torch.set_num_threads(1)
    gc.enable()
    threading.Thread(target=_let_go, daemon=True).start()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                task = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            ok, value = _perform(task)
            try:
                answer = _dumps((ok, value))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)


class RankPool:
    """Worker processes, one a rank, started when first needed and thrown away after a failure. ``simulated``: the
    simulation that they run in, see ``simulated_gpu.switch``; empty: none. ``imported``: modules that they find
    imported."""

    def __init__(self, simulated: str = "", imported: tuple[str, ...] = ()) -> None:
        self._simulated = simulated
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([*PRELOADED, *imported])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._serial = itertools.count()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        backend: str = "gloo",
        bound: bool = False,
        one_order: bool = True,
        collective_timeout: float | None = None,
    ) -> list[Any]:
        """As :func:`run_ranks`. After a failure the next call has new workers."""
        name = f"call-{next(self._serial)}"
        call = pickle.dumps((fn, args))
        in_a_collective = timedelta(seconds=collective_timeout or TIMEOUT_SECONDS[backend])
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        for rank, worker in enumerate(self._workers[:world_size]):
            if worker.error_file.exists():
                os.truncate(worker.error_file, 0)  # it is written at its end
            port, path = self._store.port, tuple(sys.path)
            task = _Task(rank, world_size, port, name, path, call, backend, bound, in_a_collective)
            with contextlib.suppress(OSError):  # a worker that died while idle is reported by _collect
                worker.connection.send_bytes(pickle.dumps(task))
        try:
            answers = self._collect(self._workers[:world_size], timeout)
            failed = self._failures(self._workers[:world_size], answers)
        except BaseException:
            self.close()
            raise
        if one_order and not failed:
            failed = simulation.different_order([issued for _, (_, issued) in answers.values()])
        if failed:
            self.close()
            raise RankFailure(failed)
        return [value for _, (value, _) in answers.values()]

    def close(self) -> None:
        """Kills every worker."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.connection.close()

    def end(self) -> None:
        """As ``close``, for good: the process that workers are forked from ends, too."""
        self.close()
        self._server._stop()

    def _start(self) -> _Worker:
        """A worker is forked from a process that has imported torch, and has done nothing with it: that takes 0.1
        seconds instead of 4. Each pool has one of its own: a simulated GPU has to be there before torch. Torch's
        sanitizer begins with CUDA as it is imported, and CUDA survives no fork."""
        context = multiprocessing.get_context("spawn" if "TORCH_CUDA_SANITIZER" in os.environ else "forkserver")
        here, there = context.Pipe()
        stack_file = Path(self._directory.name, f"stack-{next(self._serial)}")
        error_file = stack_file.with_suffix(".stderr")
        process = context.Process(target=_worker_main, args=(there, str(stack_file), str(error_file)), daemon=True)
        helpers = Path(__file__).parent
        found_in = os.pathsep.join([str(helpers), str(helpers.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (
            simulation.starting_a_rank(self._simulated),
            mock.patch.dict(os.environ, PYTHONPATH=found_in),  # it imports PRELOADED, of which some are there
            mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process),
        ):
            process.start()
        there.close()
        return _Worker(process, here, stack_file, error_file)

    def _collect(self, workers: list[_Worker], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Answers by rank, in rank order; a rank that gave none in time is missing."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left):
                rank = pending.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    workers[rank].process.join(1)
                    answers[rank] = (False, f"died with exit code {workers[rank].process.exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return dict(sorted(answers.items()))

    def _failures(self, workers: list[_Worker], answers: dict[int, tuple[bool, Any]]) -> str:
        """A text for each rank that did not succeed, ranks with the same text together; empty when all did."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank, worker in enumerate(workers):
            if rank in answers and answers[rank][0]:
                continue
            text = answers[rank][1] if rank in answers else f"did not finish; it was at:\n{self._stack(worker)}"
            said = self._said(worker)
            ranks_by_text.setdefault(f"{text}\n{said}" if said else text, []).append(rank)
        return "\n".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_text.items())

    def _said(self, worker: _Worker) -> str:
        """The end of what the worker wrote to stderr, without the frames of torch's C++, which come after the cause."""
        if not worker.error_file.exists():
            return ""
        lines = worker.error_file.read_text(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("frame #"))[-TAIL:]

    def _stack(self, worker: _Worker) -> str:
        """Where the worker stands, as its faulthandler writes it on SIGUSR1."""
        if worker.process.pid is None or not worker.process.is_alive():
            return "(it is dead)"
        if not worker.stack_file.exists():
            return "(it has not begun)"
        os.kill(worker.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not worker.stack_file.stat().st_size:
            worker.process.join(0.05)
        return worker.stack_file.read_text()


_POOLS: dict[tuple[str, tuple[str, ...]], RankPool] = {}  # by simulation, and by what is imported


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    bound: bool = False,
    simulated: str | None = None,
    one_order: bool = True,
    collective_timeout: float | None = None,
    imported: tuple[str, ...] = (),
) -> list[Any]:
    """Results of ``fn(rank, world_size, *args)`` on ``world_size`` ranks, in rank order.

    ``backend`` is that of the default process group, "gloo" or "nccl". ``bound``: an NCCL group is given its rank's GPU
    as ``device_id``, so that it communicates at once, and torch makes later groups by splitting it.

    ``simulated``: the simulation of a GPU to run in, as ``simulated_gpu.switch`` names them; None: what the environment
    says, as a rule none. ``one_order``: in a simulation, whether two ranks must issue the collectives that they share
    in the same order. False is for programs in which ranks come to several optimizers in different orders.

    ``collective_timeout``: seconds after which a collective gives up; None: those of ``TIMEOUT_SECONDS``.

    ``imported``: modules that the ranks find imported. Ranks that import a large library themselves do so one by one.

    Where the simulated GPU cannot be built, the test is skipped.

    Raises RankFailure with every failed rank's traceback, and the end of its stderr, when a rank raises, dies or has
    not answered after ``timeout`` seconds.
    """
    simulated = os.environ.get(simulation.VARIABLE, "") if simulated is None else simulated
    kind = simulated, imported
    simulation.require(simulated)
    if kind not in _POOLS:
        _POOLS[kind] = RankPool(*kind)
    return _POOLS[kind].run(world_size, fn, args, timeout, backend, bound, one_order, collective_timeout)


def on_one_gpu(body: Callable[..., Any], *args: Any, simulated: str = simulation.LATE) -> Any:
    """``body(*args)`` in a process with a simulated GPU. Raises RankFailure, which names RaceFound, where it finds
    races."""
    return run_ranks(1, _call, body, args, simulated=simulated)[0]


def _call(rank: int, world_size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return body(*args)


def new_ranks() -> None:
    """The next call has new processes, in which no thread of an earlier test runs."""
    for pool in _POOLS.values():
        pool.close()


def close_pool() -> None:
    """Ends the worker processes, and those that they are forked from; a later call starts new ones."""
    for pool in _POOLS.values():
        pool.end()


atexit.register(close_pool)
