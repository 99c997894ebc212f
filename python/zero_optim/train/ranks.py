"""The ranks of a run: starting them, their device and threads, stopping them together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from zero_optim_cli import complain, main

from ..comm.collectives import Comm, make_comm
from ..errors import UsageError
from ..stores.host_threads import own_cores

# The timeout is for a rank that is stuck: one that died closes its connections, which the others see at once. Saving
# and validation, during which ranks wait for one another, take seconds.
COLLECTIVE_TIMEOUT = timedelta(minutes=3)


def watch_signals() -> Callable[[], bool]:
    """Return a function that is true once this rank should stop: by SIGINT, by SIGTERM, or as its launcher died.

    The handlers replace Python's for the rest of the process, so that a second Ctrl-C can't break the save.
    """
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    launcher = multiprocessing.parent_process()  # of ``--ranks``
    return lambda: bool(signals) or (launcher is not None and not launcher.is_alive())


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
def join_ranks(device: str) -> Iterator[Comm]:
    """Join the process group that torchrun (or ``--ranks``) describes in the environment; else be the only rank.

    The communicator counts the trainer's own collectives, apart from the optimizer's.
    """
    gpu = None
    if device == "cuda":
        gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(gpu)
    elif os.environ.get("OMP_NUM_THREADS", "1") == "1" and local_ranks() > 1:  # torchrun's default is 1 thread
        torch.set_num_threads(max(1, len(own_cores().mask) // local_ranks()))
    if "RANK" not in os.environ:
        yield make_comm()
        return
    dist.init_process_group("nccl" if gpu else "gloo", timeout=COLLECTIVE_TIMEOUT, device_id=gpu)
    try:
        yield make_comm()
    finally:
        dist.destroy_process_group()


def launch(ranks: int, device: str | None, arguments: Sequence[str]) -> int:
    """Run the command on ``ranks`` ranks, as ``torchrun --standalone`` does. Returns the exit code.

    A signal is passed on to the ranks, which save and end. When one fails, the others are terminated, and killed after
    half a minute. Raises UsageError.
    """
    choose_device(device, ranks)  # raises before any rank is started
    print(f"starting {ranks} ranks", flush=True)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 makes no store, which would need a free port
    # Forked from a server that has only imported these, so that no rank spends seconds of a core on importing torch.
    multiprocessing.set_forkserver_preload(["zero_optim.train.loop", "torch._dynamo"])
    started = start_processes(_run, (environment, arguments), ranks, join=False, start_method="forkserver")

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started.processes:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    try:
        while not started.join(grace_period=30.0):
            pass
    except ProcessExitedException as error:
        if error.exit_code > 0:  # the rank itself has printed why
            return error.exit_code
        complain(f"zero-optim train: {error}; the others were stopped")
        return 128 - error.exit_code
    return 0


def _run(rank: int, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(main(arguments))
