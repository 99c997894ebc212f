"""Memory of a rank in each phase of a training, by stage and form of the state, with the model of ZeRO tutorials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..drop_ins import ShardedAdamW
from ..shard_module import shard_module
from .contenders import FORMS, STAGE3_KEEP_SPLIT, STAGE_OF
from .contest import Say
from .fused_adams import HYPER
from .live_memory import LiveMemory, watch
from .ranks import on_ranks
from .rows.phase import PhaseRow
from .train_step import DTYPES

RANKS = 2
STAGES = (0, 1, 2, 3)
BATCH = 20
BEFORE = ("model", "optimizer", "data")
STEP = ("forward", "backward", "step")
SHOWN_STEPS = (1, 3)  # in the first no bucket leaves before backward ends; from the third on all steps are alike
PHASES = (*BEFORE, *(f"{phase} {number}" for number in SHOWN_STEPS for phase in STEP))

Readings = dict[str, tuple[int, int]]
"""By phase: bytes after it, and the peak within it."""


@dataclass(frozen=True)
class Linears:
    """``layers`` of nn.Linear(width, width), each a unit at stage 3."""

    layers: int
    width: int

    @property
    def numel(self) -> int:
        return self.layers * self.width * (self.width + 1)


MODEL = Linears(8, 2048)


@dataclass(frozen=True)
class Way:
    """A way to train: a stage, and options of the optimizer."""

    name: str
    stage: int
    options: Mapping[str, Any]


def ways(dtype: torch.dtype) -> list[Way]:
    """List every stage, and for bf16, where a master can be split, the ways with smaller state. Units are freed after
    forward in all of them, so the contender that keeps them is left out."""
    small = [name for name in FORMS if name != STAGE3_KEEP_SPLIT] if dtype == torch.bfloat16 else []
    plain = [Way(f"stage{stage}", stage, {}) for stage in STAGES]
    return plain + [Way(name, STAGE_OF[name], FORMS[name]) for name in small]


class Walk:
    """The phases of a training, one method each.

    At stage 3 the model is built on the meta device and gets values a unit at a time, as one too large for a rank does.
    """

    def __init__(self, linears: Linears, way: Way, dtype: torch.dtype, device: torch.device) -> None:
        self._linears, self._way, self._dtype, self._device = linears, way, dtype, device
        self._model: nn.Module = nn.Identity()
        self._inputs = self._targets = self._loss = torch.empty(0)

    def model(self) -> None:
        width = self._linears.width
        with torch.device("meta" if self._way.stage == 3 else self._device):
            layers = [nn.Linear(width, width, dtype=self._dtype) for _ in range(self._linears.layers)]
        self._model = nn.Sequential(*layers)
        if self._way.stage == 3:
            shard_module(self._model, (nn.Linear,), device=self._device)

    def optimizer(self) -> None:
        way = self._way
        self._opt = ShardedAdamW(self._model.named_parameters(), stage=way.stage, **way.options, **HYPER)

    def data(self) -> None:
        shape = (BATCH, self._linears.width)
        self._inputs, self._targets = (torch.randn(shape, dtype=self._dtype, device=self._device) for _ in range(2))

    def forward(self) -> None:
        self._opt.zero_grad()
        self._loss = nn.functional.mse_loss(self._model(self._inputs), self._targets)

    def backward(self) -> None:
        self._loss.backward()
        self._loss = self._loss.detach()

    def step(self) -> None:
        self._opt.step()

    def readings(self, memory: LiveMemory) -> Readings:
        found = {phase: memory.after(getattr(self, phase)) for phase in BEFORE}
        for number in range(1, SHOWN_STEPS[-1] + 1):
            found |= {f"{phase} {number}": memory.after(getattr(self, phase)) for phase in STEP}
        return {phase: found[phase] for phase in PHASES}


def measure(linears: Linears, dtype: str, ranks: int, device: torch.device, say: Say) -> list[PhaseRow]:
    """Make a row of each way and phase, of the rank that has most then. Each way runs in fresh processes."""
    rows: list[PhaseRow] = []
    for way in ways(DTYPES[dtype]):
        say(f"memory_walkthrough: {way.name}")
        arguments = (linears, way, DTYPES[dtype], device.type)
        of_ranks = on_ranks(ranks, walk_on_rank, *arguments, device=device.type)
        for phase, (after, peak) in most(of_ranks).items():
            rows.append(PhaseRow("memory_walkthrough", way.name, dtype, linears.numel, ranks, phase, after, peak))
    return rows


def walk_on_rank(linears: Linears, way: Way, dtype: torch.dtype, device: str) -> Readings:
    place = torch.device(device)
    with watch(place) as memory:
        return Walk(linears, way, dtype, place).readings(memory)


def most(of_ranks: Sequence[Readings]) -> Readings:
    return {
        phase: (max(readings[phase][0] for readings in of_ranks), max(readings[phase][1] for readings in of_ranks))
        for phase in of_ranks[0]
    }
