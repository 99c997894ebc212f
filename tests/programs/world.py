"""What a rank of a random program is. A script that stands alone begins with this file's text.

It has no import of this package, so that it runs wherever torch does.
"""

import datetime
import os
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Planned(Exception):
    """What a program raises itself, and catches."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Planned("in backward")


def boom(x):
    return _Raise.apply(x)


def forward_boom(x):
    raise Planned("in forward")


def child(rank, world, directory, program, see, timeout, done):
    """A forked rank; ``done`` is told what came of it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{directory}/store"
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    dist.barrier()
    try:
        program(rank, world, see)
        dist.barrier()  # a rank that leaves early takes the others' connections with it
        done(rank, None)
    except BaseException:
        done(rank, brief())
    os._exit(0)


def brief():
    """The exception under way: its text, and where in the program it was."""
    kind, error, trace = sys.exc_info()
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if frame.name == "program" or frame.filename.startswith("<")]
    lines = [f"line {frame.lineno}: {frame.line}" for frame in own]
    return f"{kind.__name__}: {str(error)[:600]} ({'; '.join(lines)})"


def short(value):
    """Of arrays the first elements."""
    if isinstance(value, dict):
        return {key: short(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [short(entry) for entry in value]
    return [*(round(float(x), 6) for x in value[:3]), "..."] if hasattr(value, "shape") else value


def spawn(program, world, timeout=15.0, limit=40.0):
    """Runs a program on forked ranks, and prints what it sees."""

    def say(rank, error):
        print(f"rank {rank}: {error or 'finished'}", flush=True)

    def run(rank):
        def see(op, *seen):
            print(f"rank {rank}: {op}: {short(list(seen))}", flush=True)

        child(rank, world, directory, program, see, timeout, say)

    with tempfile.TemporaryDirectory() as directory:
        ranks = [mp.get_context("fork").Process(target=run, args=(rank,)) for rank in range(world)]
        for process in ranks:
            process.start()
        end = time.monotonic() + limit
        for rank, process in enumerate(ranks):
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                print(f"rank {rank}: HANGS", flush=True)
                process.kill()
            elif process.exitcode:
                print(f"rank {rank}: exit code {process.exitcode}", flush=True)
