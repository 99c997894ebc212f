"""Hyper-parameters that would do harm in silence, given to the constructor or set later, are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zero_optim
from torch import nn

BAD = [
    ("lr", math.nan, "lr of parameter group 0"),
    ("lr", -1.0, "lr of parameter group 0"),
    ("lr", torch.tensor([1e-3, 2e-3]), r"a tensor of one element; its shape is \(2,\)"),
    ("betas", (0.9, 1.5), "betas of parameter group 0"),
    ("betas", (math.nan, 0.999), "betas of parameter group 0"),
    ("betas", (torch.ones(2), torch.ones(2)), "a tensor of one element"),
    ("eps", 1e-60, "0 in fp32"),
    ("eps", math.inf, "eps of parameter group 0"),
    ("weight_decay", -0.1, "weight_decay of parameter group 0"),
]


def _make(**options: Any) -> tuple[nn.Parameter, zero_optim.ShardedAdamW]:
    parameter = nn.Parameter(torch.ones(3))
    return parameter, zero_optim.ShardedAdamW([parameter], **options)


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_the_constructor_refuses(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _make(**{name: value})


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_step_refuses_what_was_set_later_and_leaves_the_weights(name: str, value: Any, message: str) -> None:
    parameter, opt = _make()
    parameter.sum().backward()
    opt.step()
    before, good = parameter.detach().clone(), opt.param_groups[0][name]
    opt.param_groups[0][name] = value
    for _ in range(2):  # it goes on being wrong
        with pytest.raises(ValueError, match=message):
            opt.step()
    assert torch.equal(parameter, before)
    opt.param_groups[0][name] = good
    opt.step()
    assert not torch.equal(parameter, before)
    opt.close()


@pytest.mark.parametrize("stage", [True, False, 1.0, "2"])
def test_a_stage_is_a_number(stage: Any) -> None:
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3"):
        _make(stage=stage)
