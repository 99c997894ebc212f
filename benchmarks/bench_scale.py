"""The host's cost of a step at 8 to 16,384 ranks, on paper: Python time, collectives, padding.

    python benchmarks/bench_scale.py --ranks 8 64 1024 16384
    python benchmarks/bench_scale.py --ranks 16384 --replicas 2048  # a mesh: 2048 replicas of 8 ranks that shard

One process plays rank 0 of a fake process group (``fake_ranks``); collectives are counted and send nothing.
``buckets``, ``largest``, ``padding``, ``exchange``, ``collectives`` and ``object_bytes`` are integers of the true
shapes of Llama 2 70B. ``timed`` is of as many parameters and buckets with 1/4096 of the elements, without the kernels
that pack and update: Python's work depends on nothing else.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lab import parser_of, progress, run_script, show
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zero_optim import ShardedAdamW, memory, shard_module
from zero_optim.bench.cases import HYPER, Row
from zero_optim.bench.record import Result
from zero_optim.bench.timing import Clock, Job, Spread, interleaved
from zero_optim.comm import transport
from zero_optim.comm.handle import Handle
from zero_optim.comm.transport import Reduction, Transport
from zero_optim.errors import UsageError
from zero_optim.params.layout import BucketLayout, bucket_capacities, build_layout

TIMED = memory.KNOWN["llama-2-70b"]
RANKS = (8, 64, 1024, 16384)
STAGES = (2, 3)
KERNELS = ("pack", "foreach_step")
ITEMSIZE = 2  # bf16
SHRINK = 4096  # the model that is timed has 17 million elements, not 69 billion

# -- shapes ------------------------------------------------------------------------------------------------------------


def capacity(decoder: memory.Decoder, ranks: int) -> int:
    """Compute the elements that a bucket may hold by default, at stages 1 and 2."""
    numels = dict(enumerate(decoder.numels))
    return bucket_capacities(numels, dict.fromkeys(numels, 0), None, {0: ITEMSIZE}, ranks)[0]


def layouts(decoder: memory.Decoder, ranks: int, stage: int) -> list[BucketLayout]:
    """Lay out buckets of the true shapes: at stage 3 one for each block and one for the rest. Allocates nothing."""
    units, room = [decoder.numels[::-1]], capacity(decoder, ranks)
    if stage == 3:
        units, room = [decoder.before + decoder.after, *[decoder.block] * decoder.width.layers], 2**63
    indexed = [dict(enumerate(unit)) for unit in units]
    return [b for unit in indexed for b in build_layout(unit, dict.fromkeys(unit, 0), list(unit), {0: room}, ranks)]


# -- a fake process group ----------------------------------------------------------------------------------------------


ARRIVED: Any = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)
"""A collective that has completed."""


class Nowhere(Transport):
    """A transport that counts collectives and sends nothing. Objects are gathered: a fake group repeats rank 0's.

    Attributes:
        calls: by kind.
        object_bytes: pickled bytes of all ranks' objects, which each rank receives.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.object_bytes = 0

    def reduce_scatter(self, reduction: Reduction, group: Any, lend: Callable[[int], Tensor]) -> Handle:
        return self._issue("reduce_scatter")

    def all_gather(self, full: Tensor, own: Tensor, group: Any) -> Handle:
        return self._issue("all_gather")

    def all_reduce(self, tensor: Tensor, group: Any, *, maximum: bool = False) -> Handle:
        return self._issue("all_reduce")

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        self._issue("broadcast")

    def gather_objects(self, value: object, group: Any) -> list[Any]:
        self._issue("gather_objects")
        self.object_bytes += len(pickle.dumps(value)) * dist.get_world_size(group)
        return super().gather_objects(value, group)

    def _issue(self, kind: str) -> Handle:
        self.calls[kind] += 1
        return Handle(ARRIVED)


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
def without_kernels() -> Iterator[None]:
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


# -- the host's time ---------------------------------------------------------------------------------------------------


class Values(nn.Module):
    """Parameters of ``numels`` elements, each of which the forward uses once."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for numel in numels)

    def forward(self, x: Tensor) -> Tensor:
        for value in self.values:
            x = x + value[:1].sum()  # its gradient is whole, and mostly zero
        return x


class Block(Values):
    """A unit at stage 3."""


def model_of(decoder: memory.Decoder, shrink: int = 1) -> nn.Module:
    """Make the decoder's parameters, with 1/``shrink`` of their elements."""
    before, block, after = ([n // shrink for n in of] for of in (decoder.before, decoder.block, decoder.after))
    return nn.Sequential(Values(before), *(Block(block) for _ in range(decoder.width.layers)), Values(after))


def shard(model: nn.Module, decoder: memory.Decoder, shards: int, stage: int, mesh: DeviceMesh | None) -> ShardedAdamW:
    """Shard the small model. Its buckets get the parameters that they have by default in true shapes."""
    cap_mb = capacity(decoder, shards) * ITEMSIZE / SHRINK / 2**20
    if stage == 3:
        shard_module(model.requires_grad_(), (Block,), mesh=mesh)
        mesh = None  # the model's is taken
    return ShardedAdamW(model.named_parameters(), stage=stage, bucket_cap_mb=cap_mb, mesh=mesh, **HYPER)


def laps_of(model: nn.Module, opt: ShardedAdamW | None) -> Job:
    """List the laps of a step: forward and backward, ``step``, ``zero_grad``."""
    x = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    zero_grad = model.zero_grad if opt is None else opt.zero_grad
    return [lambda: model(x).backward(), opt.step if opt is not None else lambda: None, zero_grad]


def scale_row(decoder: memory.Decoder, ranks: int, replicas: int, stage: int, nowhere: Nowhere, rounds: int) -> Row:
    """Count and time one stage, within the fake group of ``ranks`` ranks."""
    model, shards, timed, collectives, object_bytes = model_of(decoder, SHRINK), ranks // replicas, {}, {}, {}
    mesh = None

    def once(when: str, work: Callable[[], Any]) -> Any:
        nowhere.calls.clear()
        nowhere.object_bytes, begin = 0, time.thread_time()
        made = work()
        timed[when] = (time.thread_time() - begin) * 1e3
        collectives[when], object_bytes[when] = dict(sorted(nowhere.calls.items())), nowhere.object_bytes
        return made

    if replicas > 1:
        names = ("replicate", "shard")
        mesh = once("mesh", lambda: init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names))
    opt = once("construction", lambda: shard(model, decoder, shards, stage, mesh))
    ours, plain = laps_of(model, opt), laps_of(model_of(decoder, SHRINK), None)
    for when in ("first step", "step"):
        once(when, lambda: [lap() for lap in ours])
    clock = Clock(time.thread_time)  # not what other processes take, nor torch's other threads
    times = interleaved({"ours": ours, "plain": plain}, clock, rounds)
    laps = {name: [Spread.of(lap).ms for lap in zip(*times[name], strict=True)] for name in times}
    timed |= {"hooks": laps["ours"][0] - laps["plain"][0], "step": laps["ours"][1], "zero_grad": laps["ours"][2]}
    buckets = layouts(decoder, shards, stage)
    stats = opt.stats()
    exchange = stats["collectives"]["exchange"]
    return {
        **{"op": "scale", "backend": f"stage{stage}", "dtype": "bf16", "numel": decoder.numel},
        **{"ranks": ranks, "replicas": replicas, "parameters": len(decoder.numels), "rounds": rounds},
        "buckets": len(buckets),
        "largest": max(bucket.numel for bucket in buckets),
        "padding": round(sum(bucket.numel for bucket in buckets) / decoder.numel - 1, 6),
        "exchange": exchange["bytes"] // exchange["calls"],
        "collectives": collectives,
        "object_bytes": object_bytes,
        "timed_buckets": stats["buckets"],
        "timed": timed,
    }


def scale_rows(decoder: memory.Decoder, ranks: Sequence[int], replicas: int, rounds: int) -> Iterator[Row]:
    """Make a row for each number of ranks and stage. ``replicas``: the number of ranks with each part of the state."""
    for count in ranks:
        for stage in STAGES:
            progress(f"scale: stage {stage}, {count:,} ranks in {replicas:,} replicas")
            with fake_ranks(count) as nowhere, without_kernels():
                yield scale_row(decoder, count, replicas, stage, nowhere, rounds)


def run(parsed: Any) -> None:
    for count in parsed.ranks:
        if count % parsed.replicas or count == parsed.replicas:
            raise UsageError(f"--replicas {parsed.replicas}: a divisor of the {count} ranks of --ranks, and less")
    torch.set_num_threads(1)  # times are of one thread
    result = Result(torch.device("cpu"), parsed.out, parsed.write, "scale")
    for row in scale_rows(TIMED, parsed.ranks, parsed.replicas, parsed.rounds):
        result.add([row])
    show(result)


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Counts and times what a step costs the host, by stage and number of ranks, with a fake process group."
    parser = parser_of(__file__, about, rounds=21)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, metavar="N", help="(8 64 1024 16384)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="ranks with each part of the state (1)")
    return run_script(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
