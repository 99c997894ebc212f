"""The ranks of a run: starting them, their device and threads, stopping them together, reporting failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ..comm.collectives import Comm, make_comm
from ..errors import UsageError
from ..stores.host_threads import own_cores
from .config import TrainRequest, fresh_config

# The timeout is for a rank that is stuck: one that died closes its connections, which the others see at once. Saving
# and validation, during which ranks wait for one another, take seconds.
COLLECTIVE_TIMEOUT = timedelta(minutes=3)
GRACE_SECONDS = 30.0
RANKS_PER_CORE = 8
INTERRUPTED = 130  # the exit code of a shell's Ctrl-C
Main = Callable[[Sequence[str]], int]
IMPORTED = ("zero_optim.train.loop", "torch._dynamo")  # what every rank needs


@dataclass(frozen=True)
class World:
    """This process among the ranks. ``comm`` counts the trainer's own collectives, apart from the optimizer's."""

    comm: Comm
    device: torch.device

    @property
    def size(self) -> int:
        return self.comm.world_size

    @property
    def leads(self) -> bool:
        """Rank 0 writes the run directory and prints."""
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
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    elif os.environ.get("OMP_NUM_THREADS", "1") == "1" and local_ranks() > 1:  # torchrun's default is 1 thread
        torch.set_num_threads(max(1, _cores() // local_ranks()))
    if "RANK" not in os.environ:
        yield World(make_comm(), place)
        return
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=place if device == "cuda" else None)
    try:
        yield World(make_comm(), place)
    finally:
        dist.destroy_process_group()


def _cores() -> int:
    return len(own_cores().mask)


def launch(ranks: int, request: TrainRequest, main: Main, arguments: Sequence[str]) -> int:
    """Run ``main``, of the command line, on ``ranks`` ranks, as ``torchrun --standalone`` does. Returns the exit code.

    A signal is passed on to the ranks, which save and end. When one fails, the others are terminated, and killed after
    ``GRACE_SECONDS``. Raises UsageError.
    """
    most = RANKS_PER_CORE * _cores()
    if not 1 <= ranks <= most:
        raise UsageError(f"--ranks {ranks}: from 1 to {most} on this machine ({_cores()} cores)")
    device = choose_device(request.given.get("device"), ranks)
    if request.resume is None:
        fresh_config(request.given, device)  # raises before any rank is started
    print(f"starting {ranks} ranks", flush=True)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 makes no store, which would need a free port
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    rest = (environment, main, tuple(arguments))
    started = start_processes(_run, rest, ranks, join=False, start_method=start_method(IMPORTED))

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started.processes:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    try:
        while not started.join(grace_period=GRACE_SECONDS):
            pass
    except ProcessExitedException as error:  # the rank itself has printed why
        if not error.signal_name:
            return error.exit_code
        what = f"rank {error.error_index} was killed by {error.signal_name}; the others were stopped"
        print(f"zero-optim train: {what}", file=sys.stderr)
        return 128 - error.exit_code
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)  # with the traceback of the rank
        return 1
    return 0


def start_method(imported: Sequence[str]) -> str:
    """Choose how ranks start: forked from a server that has only ``imported`` these modules, so that no rank spends
    seconds of a core on importing torch. Spawned where there is no such server."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([*imported])
    return "forkserver"


def _run(rank: int, environment: Mapping[str, str], main: Main, arguments: Sequence[str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(main(arguments))
