"""The host's cost of a step at 8 to 16,384 ranks: Python time, collectives, padding, the size of the exchange.

    python benchmarks/bench_scale.py --ranks 8 1024
    python benchmarks/bench_scale.py --ranks 16384 --replicas 2048  # a mesh: 2048 replicas of 8 ranks that share

One process plays rank 0 of a fake process group. Its collectives are counted and send nothing. There are two kinds of
figures, and a row says which is which:

- *Integers of the true shapes*: buckets, padding, bytes. The layout needs no tensors, so nothing is shrunk.
- *Timed, on small tensors*: there are as many parameters, buckets and ranks, and Python's work depends on nothing else.
  The kernels that pack and update are left out: on a CPU they would be most of the time.

``bucket_parts`` is apart: the time of one small bucket at stage 2, kernels included, on the same ranks in every run.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import bucket_parts
import torch
import torch.distributed as dist
from scale_model import LLAMA_70B, Block, Shapes, Small, cap_mb, layouts
from scale_row import ScaleRow
from script import run_script
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zero_optim import ShardedAdamW
from zero_optim.bench.contest import Say
from zero_optim.bench.fused_adams import HYPER
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.run import Measured
from zero_optim.bench.timing import HostClock, Job, Spread, TimedRounds, interleaved
from zero_optim.comm import transport
from zero_optim.comm.transport import Issued, Reduction, StreamTransport
from zero_optim.shard_module import shard_module
from zero_optim.train.config import UsageError

RANKS = (8, 64, 1024, 16384)
STAGES = (2, 3)
ROUNDS = 21
KERNELS = ("pack", "adam_step", "foreach_step")

Calls = dict[str, int]


class Arrived:
    """A collective that has completed."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Nowhere(StreamTransport):
    """A transport that counts collectives and sends nothing. Objects are gathered: a fake group repeats rank 0's.

    Attributes:
        calls: by kind.
        object_bytes: pickled bytes of all ranks' objects, which each rank receives.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.object_bytes = 0

    def reduce_scatter(self, reduction: Reduction, group: Any, lend: Callable[[int], Tensor]) -> Issued:
        return self._issue("reduce_scatter")

    def all_gather(self, full: Tensor, own: Tensor, group: Any) -> Issued:
        return self._issue("all_gather")

    def all_reduce(self, tensor: Tensor, group: Any, *, maximum: bool = False) -> Issued:
        return self._issue("all_reduce")

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        self._issue("broadcast")

    def gather_objects(self, value: object, group: Any) -> list[Any]:
        self._issue("gather_objects")
        self.object_bytes += len(pickle.dumps(value)) * dist.get_world_size(group)
        return super().gather_objects(value, group)

    def _issue(self, kind: str) -> Issued:
        self.calls[kind] += 1
        return Issued(Arrived())

    def take(self) -> tuple[Calls, int]:
        """Return the calls and the bytes of objects since the last call of this method."""
        taken = dict(sorted(self.calls.items())), self.object_bytes
        self.calls, self.object_bytes = Counter(), 0
        return taken


def measure(
    ranks: Sequence[int], rounds: int, say: Say, shapes: Shapes = LLAMA_70B, *, replicas: int = 1
) -> list[ScaleRow]:
    """Make a row for each number of ranks and stage. ``replicas``: the number of ranks with each part of the state."""
    rows = []
    say(f"scale: {bucket_parts.BUCKETS} small buckets")
    with fake_ranks(bucket_parts.RANKS):
        of_bucket = bucket_parts.measure(rounds)
    for count in ranks:
        for stage in STAGES:
            say(f"scale: stage {stage}, {count:,} ranks{f' in {replicas:,} replicas' * (replicas > 1)}")
            with fake_ranks(count) as nowhere, _without_kernels():
                row = _row(shapes, count, replicas, stage, nowhere, rounds)
            rows.append(row if stage == 3 else replace(row, of_bucket=of_bucket))
    return rows


class Training:
    """Training of the small model. A step's laps are: forward and backward, ``step``, ``zero_grad``."""

    def __init__(self, shapes: Shapes) -> None:
        self.model = Small(shapes)
        self._x = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
        self.opt: ShardedAdamW | None = None

    def shard(self, shapes: Shapes, shards: int, stage: int, mesh: DeviceMesh | None) -> None:
        if stage == 3:
            shard_module(self.model.requires_grad_(), (Block,), mesh=mesh)
        self.opt = ShardedAdamW(
            self.model.named_parameters(),
            stage=stage,
            bucket_cap_mb=cap_mb(shapes, shards),
            mesh=mesh if stage < 3 else None,  # at stage 3 the model's mesh is taken
            **HYPER,
        )

    def backward(self) -> None:
        self.model(self._x).backward()

    def step(self) -> None:
        if self.opt is not None:
            self.opt.step()

    def zero_grad(self) -> None:
        self.model.zero_grad() if self.opt is None else self.opt.zero_grad()

    @property
    def job(self) -> Job:
        return [self.backward, self.step, self.zero_grad]


@contextmanager
def fake_ranks(count: int) -> Iterator[Nowhere]:
    """Make a fake process group of ``count`` ranks, in which this process is rank 0, alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    nowhere = Nowhere()
    try:
        with transport.use(nowhere):
            yield nowhere
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Replace the kernels of the compiled library by functions that do nothing; the ops' Python code stays."""
    library = torch.ops.zero_kernels_C
    kernels = {name: getattr(library, name) for name in KERNELS if hasattr(library, name)}
    try:
        for name in kernels:
            setattr(library, name, SimpleNamespace(default=lambda *args: None))
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(library, name, kernel)


def _row(shapes: Shapes, ranks: int, replicas: int, stage: int, nowhere: Nowhere, rounds: int) -> ScaleRow:
    plain, ours = Training(shapes), Training(shapes)
    shards = ranks // replicas
    begin = time.thread_time()
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
    of_mesh = {"mesh": (time.thread_time() - begin) * 1e3} if mesh is not None else {}
    nowhere.take()
    work = {
        "construction": lambda: ours.shard(shapes, shards, stage, mesh),
        "first step": lambda: [lap() for lap in ours.job],
        "step": lambda: [lap() for lap in ours.job],
    }
    once = {when: _once(of_it, nowhere) for when, of_it in work.items()}
    clock = HostClock(time.thread_time)  # not what other processes take, nor torch's other threads
    times = interleaved({"ours": ours.job, "plain": plain.job}, clock, TimedRounds.exactly(rounds))
    laps = {name: [Spread.of(lap).ms for lap in zip(*times[name], strict=True)] for name in times}
    buckets = layouts(shapes, shards, stage)
    stats = ours.opt.stats() if ours.opt is not None else {}
    exchange = stats["collectives"]["exchange"]
    numel = sum(shapes.numels)
    return ScaleRow(
        op="scale",
        backend=f"stage{stage}",
        dtype="bf16",
        numel=numel,
        ranks=ranks,
        replicas=replicas,
        parameters=len(shapes.numels),
        buckets=len(buckets),
        largest=max(bucket.numel for bucket in buckets),
        padding=round(sum(bucket.numel for bucket in buckets) / numel - 1, 6),
        exchange=exchange["bytes"] // exchange["calls"],
        collectives={when: calls for when, (_, calls, _) in once.items()},
        object_bytes={when: nbytes for when, (_, _, nbytes) in once.items()},
        rounds=rounds,
        timed_buckets=stats["buckets"],
        timed={
            **of_mesh,
            "construction": once["construction"][0],
            "first step": once["first step"][0],
            "hooks": laps["ours"][0] - laps["plain"][0],
            "step": laps["ours"][1],
            "zero_grad": laps["ours"][2],
        },
    )


def _once(work: Callable[[], object], nowhere: Nowhere) -> tuple[float, Calls, int]:
    """Run ``work`` once. Returns milliseconds of the thread, calls, and bytes of objects."""
    begin = time.thread_time()
    work()
    return (time.thread_time() - begin) * 1e3, *nowhere.take()


ABOUT = "Counts and times what a step costs the host, by stage and number of ranks, with a fake process group."
TAKEN = {"rounds": str(ROUNDS), "ranks": " ".join(map(str, RANKS)), "replicas": "1"}
MENU = Menu({"scale": Choices(TAKEN, dtypes=("bf16",), fewest=2)})


def run(request: Request, device: torch.device, say: Say) -> Measured:
    ranks, replicas = request.ranks or RANKS, request.replicas or 1
    for count in ranks if replicas > 1 else ():
        if count % replicas or count == replicas:
            raise UsageError(f"--replicas {replicas}: a divisor of the {count} ranks of --ranks, less than all of them")
    return measure(ranks, request.rounds or ROUNDS, say, replicas=replicas), {}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("scale", ABOUT, MENU, alone={"scale": run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
