"""One rank's state that was saved after parameters were thawed or added, and before the buckets were laid out anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn

WIDTH, LAYERS, LATE = 200, 8, (1, 2)


def _model(*, thawed: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for number in () if thawed else LATE:
        model[number].requires_grad_(False)
    return model


def _optimizer(model: nn.Sequential, stage: int, rule: str, how: str) -> Any:
    made = getattr(zero_optim, rule)
    if how == "thawed":
        return made(model.parameters(), lr=0.01, stage=stage)
    late = [model[number].weight for number in LATE]
    first = [parameter for parameter in model.parameters() if all(parameter is not of for of in late)]
    opt = made(first, lr=0.01, stage=stage)
    if model[LATE[0]].weight.requires_grad:
        opt.add_param_group({"params": late})
    return opt


def _train(model: nn.Sequential, opt: Any, rank: int, steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()


def _on(model: nn.Sequential, opt: Any, rank: int) -> list[Tensor]:
    """The parameters two steps later."""
    _train(model, opt, rank, 2)
    return [parameter.detach().clone() for parameter in model.parameters()]


def _grown(rank: int, world_size: int, stage: int, rule: str, how: str) -> tuple[Any, list[list[Tensor]]]:
    """What the state says of parts, and the parameters after going on: at once, taken back, and from a new start."""
    model = _model(thawed=False)
    opt = _optimizer(model, stage, rule, how)
    _train(model, opt, rank, 2)
    for number in LATE:
        model[number].requires_grad_(True)
    if how == "added":
        opt.add_param_group({"params": [model[number].weight for number in LATE]})
    else:
        opt.step()  # takes them in; without gradients nothing is learned
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    went = [_on(model, opt, rank)]
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    went.append(_on(model, opt, rank))
    again = _model(thawed=True)
    of_new = _optimizer(again, stage, rule, how)
    again.load_state_dict(saved[0])
    of_new.load_state_dict(saved[1])
    went.append(_on(again, of_new, rank))
    return saved[1].get("parts"), went


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thawed", "added"])
@pytest.mark.parametrize("rule", ["ShardedAdamW", "ShardedMuon"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_of_parts_loads_back_and_into_a_new_optimizer(stage, rule, how):
    for parts, (on, back, anew) in run_ranks(2, _grown, stage, rule, how):
        assert parts == [LAYERS - len(LATE), len(LATE)]
        for others in (back, anew):
            assert all(torch.equal(a, b) for a, b in zip(others, on, strict=True))
