"""What a parameter costs: construction, backward and ``step()``, on 20 000 parameters and on 200.

    python benchmarks/bench_step_overhead.py

Both have as many elements. One rank is compared with ``AdamW``, two ranks at stage 2 with DDP and ``AdamW``. The same
rounds give three ops: ``backward_overhead``, ``step_overhead``, and ``loop_overhead``, which is both and
``zero_grad()``, so that work moved from one into the other shows. ``construct`` is the optimizer and its first loop,
once. ``--grouped`` adds optimizers with a group for each parameter. ``bench_checkpoint.py --width 8`` has checkpoints
of small parameters.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from contenders import replicate
from lab import parser_of, progress, run_script, show
from ranks import TogetherClock, of_the_slower, on_ranks
from torch import Tensor, nn
from zero_optim import ShardedAdamW
from zero_optim.bench.cases import DTYPES, HYPER, Masters, Row
from zero_optim.bench.record import Result
from zero_optim.bench.timing import Job, Spread, interleaved
from zero_optim_cli.choices import at_least_one

CPU = torch.device("cpu")
TRAINING: Mapping[str, Any] = {**HYPER, "lr": 1e-5}


COUNTS = (20_000, 200)
NUMEL = 10_000_000
LAPS = ("forward", "backward", "step", "zero_grad")
OPS = {"backward_overhead": ("backward",), "step_overhead": ("step",), "loop_overhead": LAPS[1:]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__file__, "Measures what a parameter costs, on the CPU.", dtype=None, ranks=None, rounds=21)
    parser.add_argument("--parameters", nargs="+", type=at_least_one, default=COUNTS, metavar="N", help="(20000 200)")
    parser.add_argument("--grouped", action="store_true", help="also with a group for each parameter")
    return run_script(parser, work, arguments)


def work(parsed: argparse.Namespace) -> None:
    result = Result(CPU, parsed.out, parsed.write, "step_overhead")
    for ranks in [parsed.ranks] if parsed.ranks else (1, 2):
        for dtype in [parsed.dtype] if parsed.dtype else ("fp32", "bf16"):
            result.add(step(NUMEL, dtype, parsed.parameters, ranks, parsed.rounds, parsed.grouped))
    show(result)


class Products(nn.Module):
    """Products of each parameter and a constant, so that each gradient is a new tensor, as in a layer."""

    def __init__(self, parameters: int, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def random() -> list[Tensor]:
            return [torch.randn(numel, generator=generator).to(dtype) for _ in range(parameters)]

        self.weights = nn.ParameterList(random())
        self.factors = random()

    def forward(self) -> Tensor:
        return torch.cat([weight * factor for weight, factor in zip(self.weights, self.factors, strict=True)])


class Loop:
    """The laps of a training loop on ``model``, which may be wrapped in DDP."""

    def __init__(self, model: nn.Module, parameters: int, step: Callable[[], object], zero_grad: Callable[[], object]):
        self._model, self._count = model, parameters
        self._loss = self._ones = torch.zeros(())
        self.job: Job = [self.forward, self.backward, step, zero_grad]

    def forward(self) -> None:
        self._loss = self._model()
        if self._ones.shape != self._loss.shape:
            self._ones = torch.ones_like(self._loss)

    def backward(self) -> None:
        self._loss.backward(self._ones)
        self._loss = self._loss.detach()
        # glibc sorts the memory that backward has freed in the next mallocs, 10 000 blocks in each (18 ms in all for
        # 20 000 parameters). These mallocs let that happen here, and not within the step.
        for _ in range(1 + 4 * self._count // 10_000):
            torch.empty(1024)


def grouped(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    return [{"params": [one], "weight_decay": (1 + n) * 1e-6} for n, one in enumerate(parameters)]


def ours(model: Products, group: Callable[..., Any] = list) -> Loop:
    opt = ShardedAdamW(group(model.parameters()), **TRAINING)
    return Loop(model, len(model.weights), opt.step, opt.zero_grad)


def torchs(model: Products, group: Callable[..., Any] = list, *, ddp: bool = False) -> Loop:
    """Make the loop of torch's fused ``AdamW``, on fp32 masters where the model has 16 bits."""
    masters = Masters(model.parameters())
    opt = torch.optim.AdamW(group(masters.masters), fused=True, **TRAINING)

    def step() -> None:
        masters.take_gradients()
        opt.step()
        masters.give_back()

    return Loop(replicate(model) if ddp else model, len(model.weights), step, model.zero_grad)


LOOPS: dict[str, Callable[[Products], Loop]] = {
    "ours": ours,
    "fused": torchs,
    "ddp": functools.partial(torchs, ddp=True),
}
LOOPS |= {f"{name} grouped": functools.partial(make, group=grouped) for name, make in LOOPS.items()}


def step(numel: int, dtype: str, counts: Sequence[int], ranks: int, rounds: int, grouped: bool = False) -> list[Row]:
    """Make rows of every optimizer on ``numel`` elements, cut into each of ``counts`` parameters."""
    progress(f"step_overhead: {dtype}, {ranks} ranks")
    names = ("ours", "fused" if ranks == 1 else "ddp")  # the second is the baseline
    names += tuple(f"{name} grouped" for name in names) if grouped else ()
    times = of_the_slower(on_ranks(ranks, time_loops, names, numel, dtype, counts, rounds))
    rows: list[Row] = []
    for count in counts:
        begun = {name: [sum(times[f"{name} {count} begun"][0])] for name in names}
        rows += rows_of("construct", dtype, count, numel // count, ranks, begun, names[1])
        laps = {name: dict(zip(LAPS, zip(*times[f"{name} {count}"], strict=True), strict=True)) for name in names}
        for op, parts in OPS.items():
            summed = {name: [*map(sum, zip(*(laps[name][lap] for lap in parts), strict=True))] for name in names}
            made = rows_of(op, dtype, count, numel // count, ranks, summed, names[1])
            for row in made if len(parts) > 1 else ():
                row["phases"] = {lap: Spread.of(laps[row["backend"]][lap]).ms for lap in parts}
            rows += made
    return rows


def time_loops(
    names: Sequence[str], numel: int, dtype: str, counts: Sequence[int], rounds: int
) -> dict[str, list[list[float]]]:
    """Time the loops in turns. ``<name> <count> begun``: construction and the first loop, once."""
    clock = TogetherClock(CPU)
    jobs: dict[str, Job] = {}
    begun: dict[str, list[list[float]]] = {}
    for name, count in itertools.product(names, counts):
        model = Products(count, numel // count, DTYPES[dtype])
        jobs[f"{name} {count}"], begun[f"{name} {count} begun"] = begin(LOOPS[name], model, clock)
    return {**interleaved(jobs, clock, rounds), **begun}


def begin(make: Callable[[Products], Loop], model: Products, clock: TogetherClock) -> tuple[Job, list[list[float]]]:
    """Construct an optimizer and run its first loop. Returns the loop's job, and the milliseconds of both."""
    job: list[Callable[[], object]] = []

    def first() -> None:
        job.extend(make(model).job)
        for lap in job:
            lap()

    return job, [clock.time([first])()]


def rows_of(
    op: str, dtype: str, parameters: int, elements: int, ranks: int, times: Mapping[str, Sequence[float]], baseline: str
) -> list[Row]:
    """Make a row for each name. ``elements``: of a parameter. ``times``: milliseconds in each round, by name."""
    spreads = {name: Spread.of(of_name) for name, of_name in times.items()}
    return [
        {
            "op": op,
            "backend": name,
            "dtype": dtype,
            "numel": parameters * elements,
            **vars(spread),
            "us_per_parameter": round(spread.ms * 1e3 / parameters, 2),
            "vs_torch": round(spreads[baseline].ms / spread.ms, 4),
            "parameters": parameters,
            "ranks": ranks,
            "baseline": baseline,
        }
        for name, spread in spreads.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
