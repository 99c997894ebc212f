"""Hyper-parameters that would do harm in silence, given to the constructor or set later, are refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from torch import nn
from zero_optim import ShardedAdamW, checkpoint, full_state_dict, load_full_state_dict

BAD = [
    ("lr", math.nan, "lr of parameter group 0"),
    ("lr", -1.0, "lr of parameter group 0"),
    ("lr", torch.tensor([1e-3, 2e-3]), r"a tensor of one element; its shape is \(2,\)"),
    ("betas", (0.9, 1.5), "betas of parameter group 0"),
    ("betas", (math.nan, 0.999), "betas of parameter group 0"),
    ("betas", (torch.ones(2), torch.ones(2)), "a tensor of one element"),
    ("betas", (0.9,), "betas of parameter group 0"),
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


@pytest.mark.parametrize("how", ["state_dict", "full_state_dict", "checkpoint", "from torch"])
def test_a_tensor_that_two_groups_have_is_one_after_a_load(how: str, tmp_path: Path) -> None:
    def make(kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        lr, alike = torch.tensor(1e-2), torch.tensor(1e-2)
        groups = [{"params": [("a", params[0])], "lr": lr}, {"params": [("b", params[1])], "lr": lr}]
        return kind([*groups, {"params": [("c", params[2])], "lr": alike}])

    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    model = nn.ParameterDict(dict(zip("abc", params, strict=True)))
    saved = make(torch.optim.AdamW if how == "from torch" else ShardedAdamW)
    for parameter in params:
        parameter.grad = torch.ones(4)
    saved.step()
    if how == "checkpoint":
        checkpoint.save(tmp_path, model, saved)
    state = copy.deepcopy(full_state_dict(saved) if how == "full_state_dict" else saved.state_dict())
    if how != "from torch":
        saved.close()
    opt = make(ShardedAdamW)
    if how == "checkpoint":
        checkpoint.load(tmp_path, model, opt)
    elif how == "full_state_dict":
        load_full_state_dict(opt, state)
    else:
        opt.load_state_dict(state)
    opt.param_groups[0]["lr"].fill_(0.5)
    assert [float(group["lr"]) for group in opt.param_groups] == [0.5, 0.5, pytest.approx(1e-2)]
