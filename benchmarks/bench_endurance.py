"""A hundred thousand steps of a small model: memory, objects, hooks, files and threads must not grow along them.

    python benchmarks/bench_endurance.py --steps 20000

Each contender trains in processes of its own, on 1 and 2 ranks. All its ranks run on one core, so that a message
between them wakes no other core. ``samples`` has 100 figures of each counter, of the rank that has most; ``growth`` is
the slope of each over the second half.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lab import parser_of, progress, run_script, show
from ranks import on_ranks
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_optim import ShardedAdamW, shard_module
from zero_optim.bench.cases import HYPER
from zero_optim.bench.record import Result
from zero_optim.errors import UsageError

SAMPLES = 100
WIDTH, BATCH = 64, 8
LIMIT_SECONDS = 12 * 3600.0
PROC = Path("/proc/self")
CONTENDERS = {1: ("stage2", "fused"), 2: ("stage2", "stage3", "ddp", "fsdp2")}
HOOKS_OF_A_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")

Samples = dict[str, list[float]]
"""By counter, a figure for each sample. ``step`` and ``ms`` are counters, too."""


# -- what a process has ------------------------------------------------------------------------------------------------


def census() -> dict[str, float]:
    """Collect garbage, then count. Two calls in a row give the same, except for ``resident``.

    Collecting is repeated, as it may leave new garbage: a graph in C++ frees Python objects, a finalizer makes some.
    """
    collections = 20  # the most: another thread may make garbage without end
    while gc.collect() and (collections := collections - 1):
        pass
    resident = int((PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(os.listdir(PROC / name)) for name in ("fd", "task"))
    types = Counter(map(type, gc.get_objects()))
    return {
        "resident": resident,  # bytes
        "objects": sum(types.values()),  # tracked by the garbage collector, and not frozen
        "tensors": sum(count for kind, count in types.items() if issubclass(kind, Tensor)),
        "nodes": _nodes(),
        "hooks": _hooks(),
        "files": files,
        "threads": threads,
    }


def _nodes() -> int:
    """Count the nodes of graphs that a live tensor keeps."""
    found: set[Node] = set()
    ahead = [node for tensor in _live(Tensor) if (node := tensor.grad_fn) is not None]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return len(found)


def _hooks() -> int:
    """Count the hooks of live tensors and modules."""
    of_tensors = sum(len(getattr(tensor, name) or ()) for tensor in _live(Tensor) for name in HOOKS_OF_A_TENSOR)
    tables = [table for module in _live(nn.Module) for name, table in vars(module).items() if name.endswith("_hooks")]
    return of_tensors + sum(map(len, tables))


def _live(kind: type) -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


# -- training ----------------------------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """A unit of the sharded contenders."""


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the model and the optimizer of a contender."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, WIDTH))
    if name.startswith("stage"):
        if name == "stage3":
            shard_module(model, (Block,))
        return model, ShardedAdamW(model.named_parameters(), stage=int(name[-1]), **HYPER)
    if name == "fsdp2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    return nn.parallel.DistributedDataParallel(model) if name == "ddp" else model, opt


def endure_on_rank(name: str, steps: int, count: int) -> Samples:
    """Train on this rank. Returns ``count`` samples; the time of a step is the median since the last sample."""
    for task in os.listdir(PROC / "task"):  # every thread, as gloo's have been started already
        os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    model, opt = make(name)
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))

    def milliseconds() -> float:
        begin = time.perf_counter()
        model(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()
        return (time.perf_counter() - begin) * 1e3

    every = max(1, steps // count)
    samples: Samples = {}
    for step in range(every, steps + 1, every):
        ms = statistics.median(milliseconds() for _ in range(every))
        for counter, figure in {"step": step, **census(), "ms": round(ms, 4)}.items():
            samples.setdefault(counter, []).append(figure)
    return samples


# -- rows --------------------------------------------------------------------------------------------------------------


def make_row(name: str, steps: int, of_ranks: Sequence[Samples]) -> dict[str, Any]:
    """Make a row, of the most of any rank for each counter and sample."""
    samples = {name: [max(of) for of in zip(*(one[name] for one in of_ranks), strict=True)] for name in of_ranks[0]}
    half = len(samples["step"]) // 2
    growth = {name: slope(samples["step"][half:], of[half:]) for name, of in samples.items() if name != "step"}
    numel = sum(parameter.numel() for parameter in make("fused")[0].parameters())
    about = {"op": "endurance", "backend": name, "dtype": "fp32", "numel": numel, "ranks": len(of_ranks)}
    return {**about, "steps": steps, "samples": samples, "growth": growth}


def slope(steps: Sequence[float], figures: Sequence[float]) -> float:
    """Compute Theil and Sen's slope: the median over all pairs of samples, which a few outliers do not change."""
    pairs = itertools.combinations(zip(steps, figures, strict=True), 2)
    slopes = [(later - earlier) / (end - begin) for (begin, earlier), (end, later) in pairs]
    return round(statistics.median(slopes), 9) if slopes else 0.0


def run(parsed: Any) -> None:
    if not PROC.exists():
        raise UsageError("endurance counts what /proc shows, which is there on Linux alone")
    result = Result(torch.device("cpu"), parsed.out, parsed.write, "endurance")
    for count, names in CONTENDERS.items():
        for name in names:
            progress(f"endurance: {name}, {count} rank{'s' * (count > 1)}")
            of_ranks = on_ranks(count, endure_on_rank, name, parsed.steps, SAMPLES, limit=LIMIT_SECONDS)
            result.add([make_row(name, parsed.steps, of_ranks)])
    show(result)


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Trains a small model for very many steps, and counts what a process has along them."
    return run_script(parser_of(__file__, about, steps=100_000), run, arguments)


if __name__ == "__main__":
    sys.exit(main())
