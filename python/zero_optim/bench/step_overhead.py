"""``step()`` alone, many small parameters against few large ones of the same total: what a parameter costs.

One rank, fp32. Two ops come of it: ``step_overhead`` is ``step()``; ``loop_overhead`` is backward, ``step()`` and
``zero_grad()``, so that work moved from one into the other shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..optimizer import ShardedAdamW
from .fused_adams import HYPER
from .record import Row
from .timing import Clock, Rounds, Spread, interleaved

MANY, FEW = 20_000, 200
NUMEL = 10_000_000
ROUNDS = 21
OURS, FUSED, FOREACH = "ours", "fused", "foreach"
LAPS = ("backward", "step", "zero_grad")
OPS = {"step_overhead": LAPS[1:2], "loop_overhead": LAPS}
TRAINING = {**HYPER, "lr": 1e-5}

Maker = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

MAKERS: Mapping[str, Maker] = {
    OURS: lambda parameters: ShardedAdamW(parameters, **TRAINING),
    FUSED: lambda parameters: torch.optim.AdamW(parameters, fused=True, **TRAINING),
    FOREACH: lambda parameters: torch.optim.AdamW(parameters, foreach=True, **TRAINING),
}


class Training:
    """Parameters of one size, their optimizer, and a backward in which each gets a gradient of its own."""

    def __init__(self, make: Maker, parameters: int, numel: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random() -> list[Tensor]:
            return [torch.randn(numel, generator=generator, device=device) for _ in range(parameters)]

        self.parameters = [nn.Parameter(tensor) for tensor in random()]
        self._factors = random()
        self._ones = [torch.ones(numel, device=device) for _ in range(parameters)]
        self.opt = make(self.parameters)

    @property
    def job(self) -> list[Callable[[], object]]:
        return [self.backward, self.opt.step, self.opt.zero_grad]

    def backward(self) -> None:
        """The gradient of each parameter is a new tensor, as layers make them: of sum(parameter * factor)."""
        products = [parameter * factor for parameter, factor in zip(self.parameters, self._factors, strict=True)]
        torch.autograd.backward(products, self._ones)
        del products
        # What this has freed is sorted by glibc in the next mallocs, 10 000 blocks in each (18 ms in all for 20 000
        # parameters): that is no work of the step's.
        for _ in range(1 + 4 * len(self.parameters) // 10_000):
            torch.empty(1024)


def measure(
    device: torch.device, numel: int, clock: Clock, rounds: Rounds, counts: Sequence[int] = (MANY, FEW)
) -> list[Row]:
    """Rows of every optimizer on ``numel`` elements, in each of ``counts`` parameters."""
    trainings = {
        (name, count): Training(make, count, numel // count, device)
        for count in counts
        for name, make in MAKERS.items()
    }
    jobs = {f"{name} {count}": training.job for (name, count), training in trainings.items()}
    times = interleaved(jobs, clock, rounds)
    laps = {
        key: [dict(zip(LAPS, of_round, strict=True)) for of_round in times[f"{key[0]} {key[1]}"]] for key in trainings
    }
    return [row for op in OPS for count in counts for row in _rows(op, count, numel // count * count, laps)]


def _rows(
    op: str, count: int, numel: int, laps: Mapping[tuple[str, int], Sequence[Mapping[str, float]]]
) -> Iterator[Row]:
    spreads = {
        name: Spread.of([sum(of_round[lap] for lap in OPS[op]) for of_round in laps[name, count]]) for name in MAKERS
    }
    for name, spread in spreads.items():
        phases = {lap: Spread.of([of_round[lap] for of_round in laps[name, count]]).ms for lap in OPS[op]}
        yield Row.of_whole(
            op=op,
            backend=name,
            dtype="fp32",
            numel=numel,
            spread=spread,
            vs_torch=spreads[FUSED].ms / spread.ms,
            vs={FOREACH: round(spreads[FOREACH].ms / spread.ms, 4)},
            phases=phases if len(phases) > 1 else None,
            parameters=count,
        )
