"""The cost of a parameter: a training loop's parts on many small parameters, and on few large ones of the same total.

One rank is compared with ``AdamW``; several ranks, at stage 2, with DDP and ``AdamW``. The same rounds give three ops:
``backward_overhead``, ``step_overhead``, and ``loop_overhead``, which is both and ``zero_grad()``, so that work moved
from one into the other shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..comm.collectives import make_comm
from ..drop_ins import ShardedAdamW
from .contest import TogetherClock, in_all, slower
from .fused_adams import HYPER
from .masters import Masters
from .ranks import on_ranks
from .rows.op import Row
from .timing import Clock, HostClock, Job, Spread, TimedRounds, interleaved
from .train_step import DTYPES

MANY, FEW = 20_000, 200
NUMEL = 10_000_000
RANKS = (1, 2)
ROUNDS = 21
OURS, FUSED, FOREACH, DDP = "ours", "fused", "foreach", "ddp"
LAPS = ("forward", "backward", "step", "zero_grad")
OPS = {"backward_overhead": ("backward",), "step_overhead": ("step",), "loop_overhead": LAPS[1:]}
TRAINING = {**HYPER, "lr": 1e-5}

Laps = Mapping[str, Sequence[Mapping[str, float]]]  # by optimizer and number of parameters: ms by lap, of each round


class Products(nn.Module):
    """Products of each parameter and a constant, so that each gradient is a new tensor, as in a layer."""

    def __init__(self, parameters: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)

        def random() -> list[Tensor]:
            return [torch.randn(numel, generator=generator, device=device).to(dtype) for _ in range(parameters)]

        self.weights = nn.ParameterList(random())
        self.factors = random()

    def forward(self) -> Tensor:
        return torch.cat([weight * factor for weight, factor in zip(self.weights, self.factors, strict=True)])


class Loop:
    """The laps of a training loop on ``model``."""

    def __init__(
        self, model: nn.Module, parameters: int, step: Callable[[], object], zero_grad: Callable[[], object]
    ) -> None:
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
    called: nn.Module = model
    if ddp:
        called = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)

    def step() -> None:
        masters.take_gradients()
        opt.step()
        masters.give_back()

    return Loop(called, len(model.weights), step, model.zero_grad)


MAKERS: Mapping[str, Callable[[Products], Loop]] = {
    OURS: ours,
    FUSED: lambda model: torchs(model, fused=True),
    FOREACH: lambda model: torchs(model, foreach=True),
    DDP: lambda model: torchs(model, ddp=True, fused=True),
}
ALONE, ON_RANKS = (OURS, FUSED, FOREACH), (OURS, DDP)


def measure(
    device: torch.device,
    numel: int,
    dtypes: Sequence[str],
    ranks: Sequence[int],
    clock: Clock,
    rounds: TimedRounds,
    counts: Sequence[int] = (MANY, FEW),
) -> list[Row]:
    """Make rows of every optimizer on ``numel`` elements, cut into each of ``counts`` parameters."""
    rows = []
    for world_size in ranks:
        for dtype in dtypes:
            if world_size == 1:
                laps = time_laps(ALONE, device, numel, dtype, counts, clock, rounds)
            else:
                laps = slower(on_ranks(world_size, time_on_rank, numel, dtype, counts, rounds), in_all)
            rows += [row for op in OPS for count in counts for row in _rows(op, count, numel, dtype, world_size, laps)]
    return sorted(rows, key=lambda row: (row.ranks or 1, list(OPS).index(row.op)))


def time_on_rank(numel: int, dtype: str, counts: Sequence[int], rounds: TimedRounds) -> Laps:
    cpu = torch.device("cpu")
    return time_laps(ON_RANKS, cpu, numel, dtype, counts, TogetherClock(make_comm(), cpu, HostClock()), rounds)


def time_laps(
    names: Sequence[str],
    device: torch.device,
    numel: int,
    dtype: str,
    counts: Sequence[int],
    clock: Clock,
    rounds: TimedRounds,
) -> Laps:
    """Time every lap in every round, in milliseconds."""
    trainings = {
        _key(name, count): MAKERS[name](Products(count, numel // count, DTYPES[dtype], device))
        for count in counts
        for name in names
    }
    times = interleaved({key: training.job for key, training in trainings.items()}, clock, rounds)
    return {key: [dict(zip(LAPS, of_round, strict=True)) for of_round in times[key]] for key in trainings}


def _key(name: str, count: int) -> str:
    return f"{name} {count}"


def _rows(op: str, count: int, numel: int, dtype: str, ranks: int, laps: Laps) -> Iterator[Row]:
    names, baseline = (ALONE, FUSED) if ranks == 1 else (ON_RANKS, DDP)
    of_names = {name: laps[_key(name, count)] for name in names}
    spreads = {
        name: Spread.of([sum(of_round[lap] for lap in OPS[op]) for of_round in rounds])
        for name, rounds in of_names.items()
    }
    for name, spread in spreads.items():
        phases = {lap: Spread.of([of_round[lap] for of_round in of_names[name]]).ms for lap in OPS[op]}
        others = {FOREACH: round(spreads[FOREACH].ms / spread.ms, 4)} if FOREACH in spreads else {}
        yield Row.of_whole(
            op=op,
            backend=name,
            dtype=dtype,
            numel=numel // count * count,
            spread=spread,
            vs_torch=spreads[baseline].ms / spread.ms,
            vs=others,
            phases=phases if len(phases) > 1 else None,
            parameters=count,
            ranks=None if ranks == 1 else ranks,
            baseline=baseline,
        )
