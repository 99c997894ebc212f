"""What a parameter costs.

    python benchmarks/bench_step_overhead.py          # step: a training loop's parts, on 20 000 parameters and on 200
    python benchmarks/bench_step_overhead.py calls    # construction, first step, state dicts, by the parameter

``step`` trains as many elements as 20 000 and as 200 parameters: one rank against ``AdamW``, two ranks at stage 2
against DDP and ``AdamW``. The same rounds give three ops: ``backward_overhead``, ``step_overhead``, and
``loop_overhead``, which is both and ``zero_grad()``, so that work moved from one into the other shows.

``calls`` makes an optimizer of 10 000 and of 1 000 parameters of 8 elements on two ranks, and times its first calls
once a round, against DDP and FSDP2 with ``AdamW``. ``bench_checkpoint.py --width 8`` has checkpoints of as small ones.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from contenders import replicate
from lab import parser_of, progress, run_script, show
from ranks import TogetherClock, of_the_slower, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from zero_optim import ShardedAdamW
from zero_optim.bench.cases import DTYPES, HYPER, Row
from zero_optim.bench.record import Result
from zero_optim.bench.step import Masters
from zero_optim.bench.timing import Clock, Job, Spread, interleaved
from zero_optim_cli.bench import at_least_one

CPU = torch.device("cpu")
TRAINING: Mapping[str, Any] = {**HYPER, "lr": 1e-5}
Times = Mapping[str, Sequence[Sequence[float]]]  # milliseconds by job: of each lap in each round


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__file__, "Measures what a parameter costs, on the CPU.", dtype=None, ranks=None, rounds=None)
    parser.add_argument("question", nargs="?", choices=("step", "calls"), default="step", help="what is timed (step)")
    about = "how many (step: 20000 200; calls: 10000 1000)"
    parser.add_argument("--parameters", nargs="+", type=at_least_one, metavar="N", help=about)
    return run_script(parser, work, arguments)


def work(parsed: argparse.Namespace) -> None:
    result = Result(CPU, parsed.out, parsed.write, "calls" if parsed.question == "calls" else "step_overhead")
    if parsed.question == "calls":
        for count in parsed.parameters or (10_000, 1_000):
            result.add(calls(count, parsed.ranks or 2, parsed.rounds or 3))
    else:
        for ranks in [parsed.ranks] if parsed.ranks else (1, 2):
            for dtype in [parsed.dtype] if parsed.dtype else ("fp32", "bf16"):
                result.add(step(NUMEL, dtype, parsed.parameters or COUNTS, ranks, parsed.rounds or 21))
    show(result)


# -- step: the parts of a training loop --------------------------------------------------------------------------------

COUNTS = (20_000, 200)
NUMEL = 10_000_000
LAPS = ("forward", "backward", "step", "zero_grad")
OPS = {"backward_overhead": ("backward",), "step_overhead": ("step",), "loop_overhead": LAPS[1:]}


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


def ours(model: Products) -> Loop:
    opt = ShardedAdamW(model.parameters(), **TRAINING)
    return Loop(model, len(model.weights), opt.step, opt.zero_grad)


def torchs(model: Products, *, fused: bool = False, foreach: bool = False, ddp: bool = False) -> Loop:
    """Make the loop of torch's ``AdamW``, on fp32 masters where the model has 16 bits."""
    masters = Masters(model.parameters())
    opt = torch.optim.AdamW(masters.masters, fused=fused, foreach=foreach, **TRAINING)

    def step() -> None:
        masters.take_gradients()
        opt.step()
        masters.give_back()

    return Loop(replicate(model) if ddp else model, len(model.weights), step, model.zero_grad)


LOOPS: Mapping[str, Callable[[Products], Loop]] = {
    "ours": ours,
    "fused": functools.partial(torchs, fused=True),
    "foreach": functools.partial(torchs, foreach=True),
    "ddp": functools.partial(torchs, fused=True, ddp=True),
}
ON_ONE_RANK, ON_RANKS = ("ours", "fused", "foreach"), ("ours", "ddp")  # the second is the baseline


def step(numel: int, dtype: str, counts: Sequence[int], ranks: int, rounds: int) -> list[Row]:
    """Make rows of every optimizer on ``numel`` elements, cut into each of ``counts`` parameters."""
    progress(f"step_overhead: {dtype}, {ranks} ranks")
    names = ON_ONE_RANK if ranks == 1 else ON_RANKS
    if ranks == 1:  # needs no process group, and no other processes
        times = time_loops(names, numel, dtype, counts, rounds)
    else:
        times = of_the_slower(on_ranks(ranks, time_loops, names, numel, dtype, counts, rounds))
    return [row for op in OPS for count in counts for row in _rows(op, count, numel, dtype, ranks, names, times)]


def time_loops(
    names: Sequence[str], numel: int, dtype: str, counts: Sequence[int], rounds: int
) -> dict[str, list[list[float]]]:
    loops = {
        f"{name} {count}": LOOPS[name](Products(count, numel // count, DTYPES[dtype]))
        for count in counts
        for name in names
    }
    clock = TogetherClock(CPU) if dist.is_initialized() else Clock()
    return interleaved({name: loop.job for name, loop in loops.items()}, clock, rounds)


def _rows(op: str, count: int, numel: int, dtype: str, ranks: int, names: Sequence[str], times: Times) -> Iterator[Row]:
    laps = {name: dict(zip(LAPS, zip(*times[f"{name} {count}"], strict=True), strict=True)) for name in names}
    summed = {name: [*map(sum, zip(*(laps[name][lap] for lap in OPS[op]), strict=True))] for name in names}
    for row in rows_of(op, dtype, count, numel // count, ranks, summed, names[1]):
        phases = {lap: Spread.of(laps[row["backend"]][lap]).ms for lap in OPS[op]}
        yield {**row, "phases": phases if len(phases) > 1 else None}


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


# -- calls: the start of an optimizer's life ---------------------------------------------------------------------------

ELEMENTS = 8  # of a parameter
CALLS = ("construct", "first_backward", "first_step", "state_dict", "load_state_dict")
Made = tuple[nn.Module, torch.optim.Optimizer]


def our_calls(model: Products) -> Made:
    return model, ShardedAdamW(model.named_parameters(), **TRAINING)


def ddp_calls(model: Products) -> Made:
    return replicate(model), torch.optim.AdamW(model.parameters(), **TRAINING)


def fsdp2_calls(model: Products) -> Made:
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), **TRAINING)


MAKERS: Mapping[str, Callable[[Products], Made]] = {"ours": our_calls, "ddp": ddp_calls, "fsdp2": fsdp2_calls}


class Life:
    """The calls of an optimizer as the laps of a job that starts anew each time."""

    def __init__(self, make: Callable[[Products], Made], parameters: int) -> None:
        self._make, self._count = make, parameters
        self._opt: Any = None
        self._state: dict[str, Any] = {}

    @property
    def job(self) -> Job:
        """The laps, as CALLS names them; before them all, ``fresh``."""
        return [
            self.fresh,
            self.construct,
            lambda: self._model().sum().backward(),
            lambda: self._opt.step(),
            self.state_dict,
            lambda: self._opt.load_state_dict(self._state),
        ]

    def fresh(self) -> None:
        """Drop the last optimizer, and make a new model."""
        if isinstance(self._opt, ShardedAdamW):
            self._opt.close()
        self._opt, self._state, self._model = None, {}, Products(self._count, ELEMENTS, torch.float32)
        dist.barrier()

    def construct(self) -> None:
        self._model, self._opt = self._make(self._model)

    def state_dict(self) -> None:
        self._state = self._opt.state_dict()


def calls(parameters: int, ranks: int, rounds: int) -> list[Row]:
    """Make a row for each call of each optimizer."""
    progress(f"calls: {parameters:,} parameters on {ranks} ranks, {rounds} rounds")
    times = of_the_slower(on_ranks(ranks, time_calls, parameters, rounds))
    rows: list[Row] = []
    for number, call in enumerate(CALLS, start=1):
        columns = {name: [laps[number] for laps in times[name]] for name in times}
        rows += rows_of(call, "fp32", parameters, ELEMENTS, ranks, columns, "ddp")
    return rows


def time_calls(parameters: int, rounds: int) -> dict[str, list[list[float]]]:
    def jobs(count: int) -> dict[str, Job]:
        return {name: Life(make, count).job for name, make in MAKERS.items()}

    interleaved(jobs(2 * dist.get_world_size()), TogetherClock(CPU), 1, warm_up=0)  # loads all code
    return interleaved(jobs(parameters), TogetherClock(CPU), rounds, warm_up=0)


if __name__ == "__main__":
    sys.exit(main())
