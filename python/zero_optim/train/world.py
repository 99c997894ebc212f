"""The ranks of a run: starting them, giving each a device and threads, stopping them together, reporting failures."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..comm.collectives import Comm, make_comm
from ..errors import UsageError
from ..stores.host_threads import own_cores
from .config import TrainRequest, fresh_config

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# The timeout is for a rank that is stuck: one that died closes its connections, which the others see at once. Saving
# and validation, during which ranks wait for one another, take seconds.
COLLECTIVE_TIMEOUT = timedelta(minutes=3)
RANKS_PER_CORE = 8
INTERRUPTED = 130  # the exit code of a shell's Ctrl-C
Main = Callable[[Sequence[str]], int]
IMPORTED = ("zero_optim.train.loop", "torch._dynamo")  # what every rank needs


@dataclass(frozen=True)
class World:
    """This process among the ranks. ``comm`` counts the trainer's own collectives, apart from the optimizer's."""

    comm: Comm
    device: torch.device
    backend: str | None  # of the process group; None for one rank without one

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.world_size

    @property
    def leads(self) -> bool:
        """Rank 0 writes the run directory and speaks for all."""
        return self.comm.rank == 0


class StopFlag:
    """Set by SIGINT, SIGTERM, or the death of the launcher; the ranks agree on it once a step.

    The handlers replace Python's for the rest of the process, so that a second Ctrl-C can't break the save.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._parent = os.getppid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def __bool__(self) -> bool:
        return self._signalled or ("RANK" in os.environ and not self._launcher_lives())

    def _launcher_lives(self) -> bool:
        """True while the launcher runs. With ``--ranks`` the parent is a fork server, which outlives the launcher."""
        launcher = multiprocessing.parent_process()
        return os.getppid() == self._parent if launcher is None else launcher.is_alive()


def choose_device(wanted: str | None, local_ranks: int) -> str:
    """Choose "cuda" where each rank can have a GPU of its own, else "cpu". Raises UsageError for too few GPUs."""
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < local_ranks:
        raise UsageError(f"--device cuda: {local_ranks} ranks on this machine, but {gpus} GPUs; NCCL needs one a rank")
    return "cuda" if wanted != "cpu" and gpus >= local_ranks else "cpu"


def local_ranks() -> int:
    """Number of ranks on this machine, which the launcher has put into the environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the process group that torchrun (or ``--ranks``) describes in the environment; else be the only rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        _share_cores()
    if "RANK" not in os.environ:
        yield World(make_comm(), place, None)
        return
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=place if device == "cuda" else None)
    try:
        yield World(make_comm(), place, backend)
    finally:
        dist.destroy_process_group()


def _share_cores() -> None:
    """Share the cores out over the ranks where OMP_NUM_THREADS is 1: torchrun sets that unless the user has set it."""
    if os.environ.get("OMP_NUM_THREADS", "1") == "1" and local_ranks() > 1:
        torch.set_num_threads(max(1, _cores() // local_ranks()))


def _cores() -> int:
    return len(own_cores().mask)


def launch(ranks: int, request: TrainRequest, main: Main, arguments: Sequence[str]) -> int:
    """Run ``main``, of the command line, on ``ranks`` ranks, as ``torchrun --standalone`` does. Returns the exit code.

    This is torchrun's engine without its report of failures: ranks print theirs on stderr. Raises UsageError.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    most = RANKS_PER_CORE * _cores()
    if not 1 <= ranks <= most:
        raise UsageError(f"--ranks {ranks}: from 1 to {most} on this machine ({_cores()} cores)")
    device = choose_device(request.given.get("device"), ranks)
    if request.resume is None:
        fresh_config(request.given, device)  # raises before any rank is started
    print(f"starting {ranks} ranks", flush=True)
    logging.disable(logging.ERROR)  # of this process, which does nothing but launch
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    method = start_method(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="zero-optim-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # else the ranks would meet at the host's name, which need not resolve
            max_restarts=0,
            start_method=method,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, _run)(main, tuple(arguments))
        except ChildFailedError as error:
            return _report_failure(error)
        except SignalException:
            return INTERRUPTED
    return 0


def start_method(imported: Sequence[str]) -> str:
    """Choose how ranks start: forked from a server that has only ``imported`` these modules, so that no rank spends
    seconds of a core on importing torch. Spawned where there is no such server."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([*imported])
    return "forkserver"


def _run(main: Main, arguments: Sequence[str]) -> None:
    """Run one rank; ``main`` reads its number from the environment. Print its error here: the launcher does not."""
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def _report_failure(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"zero-optim train: rank {rank} was killed by {name}; the others were stopped", file=sys.stderr)
        return 128 - failure.exitcode
    return failure.exitcode
