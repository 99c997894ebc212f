"""What the tests of ``ShardedMuon`` share: options, and a rank alone that has the averages of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import zero_optim
from oracle import average
from torch import Tensor, nn
from zero_optim import ShardedMuon

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.875}
"""1 - momentum is a power of two. So torch, which fuses the product in a lerp with the sum, has nothing to round once
where we round twice."""

AS_TORCH = {"ns_gram": False}
"""With it the operations are torch's, one by one."""

Gradient = Callable[[int, int, int], Tensor]
"""Of a rank, a step and a parameter's number."""


def mean(gradient: Gradient, world_size: int, step: int, number: int) -> Tensor:
    """The average over the ranks of what they have in a step."""
    found = average([gradient(rank, step, number) for rank in range(world_size)])
    assert found is not None
    return found


def step_on_rank(opt: ShardedMuon, params: Sequence[nn.Parameter], gradient: Gradient, rank: int, step: int) -> None:
    """Collective. A backward that gives each parameter its gradient, and a step."""
    terms = ((p * gradient(rank, step, number)).sum() for number, p in enumerate(params))
    sum(terms, torch.zeros((), dtype=params[0].dtype)).backward()
    opt.step()
    opt.zero_grad()


def masters_of(opt: ShardedMuon, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Collective. They are whole."""
    state = zero_optim.full_state_dict(opt, rank=None)["state"]
    return [state[number].get("master", p.detach().clone()) for number, p in enumerate(params)]


def masters_alone(
    opt: ShardedMuon, params: Sequence[nn.Parameter], gradient: Gradient, world_size: int, steps: Iterable[int]
) -> list[Tensor]:
    """The masters after these steps of one rank that is given the averages of ``world_size``. ``opt`` is closed."""
    for step in steps:
        for number, parameter in enumerate(params):
            parameter.grad = mean(gradient, world_size, step, number)
        opt.step()
    masters = masters_of(opt, params)
    opt.close()
    return masters
