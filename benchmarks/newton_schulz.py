"""The Newton-Schulz iteration's part of a training step by Muon, on each rank: its time, and its multiplications."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from zero_optim.bench.contenders import DDP_MUON, MAKERS, Task
from zero_optim.bench.train_step import WARM_UP_STEPS, train
from zero_optim.rules import Muon, newton_schulz

ITERATIONS = {True: (torch.optim._muon, "_zeropower_via_newtonschulz"), False: (newton_schulz, "orthogonalized")}
"""Module and name of the iteration: torch's, and ours."""


@dataclass
class Iteration:
    """Time and work of a rank in the iteration. ``multiplications``: as many as our form of it takes."""

    seconds: float = 0.0
    multiplications: int = 0


@dataclass(frozen=True)
class OfRank:
    """Figures of a rank. ``share``: the iteration's part of a step's time, median. ``multiplications``: in a step."""

    share: float
    multiplications: int


@contextmanager
def watched(name: str, device: torch.device) -> Iterator[Iteration]:
    """Time and count the iterations of the contender ``name`` in this block."""
    seen = Iteration()
    module, of = ITERATIONS[name == DDP_MUON]
    real: Callable[..., Tensor] = getattr(module, of)

    def run(matrix: Tensor, *options: Any) -> Tensor:
        begin = _now(device)
        result = real(matrix, *options)
        seen.seconds += _now(device) - begin
        several = matrix.numel() // (matrix.shape[-2] * matrix.shape[-1])
        seen.multiplications += several * Muon().cost(tuple(matrix.shape[-2:]))
        return result

    with mock.patch.object(module, of, run):
        yield seen


def on_rank(task: Task, name: str, rounds: int) -> OfRank:
    """Collective. Train one contender. On a GPU the host waits around each iteration, which makes a step longer."""
    contender = MAKERS[name](task)
    train(contender, WARM_UP_STEPS)
    shares = []
    for _ in range(rounds):
        with watched(name, task.device) as seen:
            begin = _now(task.device)
            train(contender, 1)
            shares.append(seen.seconds / (_now(task.device) - begin))
    return OfRank(statistics.median(shares), seen.multiplications)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
