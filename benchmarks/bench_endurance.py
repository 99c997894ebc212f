"""A hundred thousand steps of a small model: memory, objects, hooks, files and threads must not grow along them.

    python benchmarks/bench_endurance.py --steps 20000 --ranks 2

Each contender trains in processes of its own. All its ranks share one core, so that a message between them wakes no
other core. As many contenders train at once as there are cores.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import SimpleQueue

import census
import torch
import torch.distributed as dist
from endurance_row import EnduranceRow
from script import run_script
from torch import nn
from zero_optim import ShardedAdamW
from zero_optim.bench.fused_adams import HYPER
from zero_optim.bench.ranks import on_ranks
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.run import Measured
from zero_optim.errors import UsageError
from zero_optim.shard_module import shard_module

STEPS = 100_000
SAMPLES = 100
RANKS = (1, 2)
WIDTH, BATCH = 64, 8
LIMIT_SECONDS = 12 * 3600.0
STAGE2, STAGE3, FUSED, DDP, FSDP2 = "stage2", "stage3", "fused", "ddp", "fsdp2"

Samples = dict[str, list[float]]
"""By counter, a figure for each sample. ``step`` and ``ms`` are counters, too."""


class Block(nn.Sequential):
    """A unit of the sharded contenders."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, WIDTH))


NUMEL = sum(parameter.numel() for parameter in make_model().parameters())

Training = tuple[nn.Module, torch.optim.Optimizer]


def _ours(stage: int) -> Training:
    model = make_model()
    if stage == 3:
        shard_module(model, (Block,))
    return model, ShardedAdamW(model.named_parameters(), stage=stage, **HYPER)


def _fused() -> Training:
    model = make_model()
    return model, torch.optim.AdamW(model.parameters(), fused=True, **HYPER)


def _ddp() -> Training:
    model, opt = _fused()
    return nn.parallel.DistributedDataParallel(model), opt


def _fsdp2() -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), fused=True, **HYPER)


MAKERS: Mapping[str, Callable[[], Training]] = {
    STAGE2: lambda: _ours(2),
    STAGE3: lambda: _ours(3),
    FUSED: _fused,
    DDP: _ddp,
    FSDP2: _fsdp2,
}


def contenders(ranks: int) -> tuple[str, ...]:
    """Choose the contenders for so many ranks. On one rank there is nothing to share, so DDP and FSDP2 are left out."""
    return (STAGE2, FUSED) if ranks == 1 else (STAGE2, STAGE3, DDP, FSDP2)


def measure(ranks: Sequence[int], steps: int, say: Callable[[str], object]) -> list[EnduranceRow]:
    """Make a row of each contender on each number of ranks."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)

    def endure(task: tuple[int, str]) -> EnduranceRow:
        (count, name), core = task, cores.get()
        say(f"endurance: {name}, {count} rank{'s' * (count > 1)}")
        try:
            samples = most(on_ranks(count, endure_on_rank, name, steps, core, limit=LIMIT_SECONDS))
        finally:
            cores.put(core)
        return make_row(name, count, steps, samples)

    tasks = [(count, name) for count in sorted(ranks, reverse=True) for name in contenders(count)]
    with ThreadPoolExecutor(cores.qsize()) as pool:
        rows = list(pool.map(endure, tasks))
    return sorted(rows, key=lambda row: row.ranks)


def endure_on_rank(name: str, steps: int, core: int) -> Samples:
    """Train on this rank. Returns its samples; the time of a step is the median since the last sample."""
    for task in os.listdir(census.PROC / "task"):  # every thread, as gloo's have been started already
        os.sched_setaffinity(int(task), {core})
    torch.set_num_threads(1)
    model, opt = MAKERS[name]()
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    every = max(1, steps // SAMPLES)
    samples: Samples = {}
    for step in range(every, steps + 1, every):
        ms = statistics.median(_milliseconds(model, opt, inputs) for _ in range(every))
        for counter, figure in {"step": step, **asdict(census.take()), "ms": round(ms, 4)}.items():
            samples.setdefault(counter, []).append(figure)
    return samples


def _milliseconds(model: nn.Module, opt: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(inputs).square().mean().backward()
    opt.step()
    opt.zero_grad()
    return (time.perf_counter() - begin) * 1e3


def most(of_ranks: Sequence[Samples]) -> Samples:
    """Take the most of any rank, for each counter and sample."""
    return {
        counter: [max(of_sample) for of_sample in zip(*(samples[counter] for samples in of_ranks), strict=True)]
        for counter in of_ranks[0]
    }


def make_row(name: str, ranks: int, steps: int, samples: Samples) -> EnduranceRow:
    counters = [counter for counter in samples if counter != "step"]
    half = len(samples["step"]) // 2
    growth = {counter: slope(samples["step"][half:], samples[counter][half:]) for counter in counters}
    return EnduranceRow("endurance", name, "fp32", NUMEL, ranks, steps, samples, growth)


def slope(steps: Sequence[float], figures: Sequence[float]) -> float:
    """Compute Theil and Sen's slope: the median over all pairs of samples, which a few outliers do not change."""
    pairs = itertools.combinations(zip(steps, figures, strict=True), 2)
    slopes = [(later - earlier) / (end - begin) for (begin, earlier), (end, later) in pairs]
    return round(statistics.median(slopes), 9) if slopes else 0.0


ABOUT = "Trains a small model for very many steps, and counts what a process has along them."
TAKEN = {"steps": str(STEPS), "ranks": " ".join(map(str, RANKS))}
MENU = Menu({"endurance": Choices(TAKEN, dtypes=("fp32",))})


def run(request: Request, device: torch.device, say: Callable[[str], object]) -> Measured:
    if not census.can_count():
        raise UsageError("endurance counts what /proc shows, which is there on Linux alone")
    return measure(request.ranks or RANKS, request.steps or STEPS, say), {}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("endurance", ABOUT, MENU, alone={"endurance": run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
