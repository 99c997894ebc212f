"""Schedulers of torch and transformers: the optimizer reads its groups at every step, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zero_optim
from client_cases import assert_like_adamw, needs, weights
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

LR, STEPS = 1e-2, 8

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    "cyclic_with_betas": lambda o: lr_scheduler.CyclicLR(o, 1e-3, LR, step_size_up=2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, LR, total_steps=STEPS + 1),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingWarmRestarts(o, 3)], [2]
    ),
    "swa": lambda o: SWALR(o, LR / 2, anneal_epochs=3),
}


def train(make_optimizer: Any, make_schedule: Callable[[Any], Any]) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = make_optimizer(model.parameters(), lr=LR)
    schedule = make_schedule(optimizer)
    for step in range(STEPS):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(*[1.0] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))
    return model, {name: optimizer.param_groups[0][name] for name in ("lr", "betas")}


def check(make_schedule: Callable[[Any], Any]) -> None:
    ours, options = train(zero_optim.ShardedAdamW, make_schedule)
    expected, torchs = train(torch.optim.AdamW, make_schedule)
    assert options == torchs
    assert_like_adamw(weights(ours), weights(expected), LR, STEPS)


@pytest.mark.parametrize("make_schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_torchs(make_schedule: Callable[[Any], Any]) -> None:
    check(make_schedule)


@pytest.mark.parametrize("name", ["cosine_with_restarts", "warmup_stable_decay"])
@needs("transformers")
def test_transformers(name: str) -> None:
    from transformers import get_scheduler

    options = {"num_decay_steps": 4} if name == "warmup_stable_decay" else {}
    check(lambda optimizer: get_scheduler(name, optimizer, 2, STEPS, scheduler_specific_kwargs=options))
