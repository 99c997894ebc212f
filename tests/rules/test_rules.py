"""Rules of the package: their state moves to torch's optimizers and back, their options, their memory.

Their numbers are the random programs', at every stage and in every store, and ``kernels/test_foreach_step.py``'s.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from oracle import PaperLion
from torch import Tensor, nn
from training_cases import TINY_CAP_MB, assert_bitwise, assert_within, copies, linear_backward, make_gradients
from training_cases import make_parameters as make
from zero_optim import cli

SHAPES = ((17, 9), (300,), (1,), (5, 3, 2), (128,), (40, 25))
SOMETIMES = 1  # of them: used in every other step
STEPS = 4
EPS = 2.0**-23


@dataclass(frozen=True)
class Rule:
    """A rule, and who says what it must compute.

    Attributes:
        size: of an update, in units of which rounding errors are counted.
    """

    make: Callable[..., Any]
    oracle: Callable[..., torch.optim.Optimizer]
    size: float


ADAM = {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1}
SGD = {"lr": 1e-2, "weight_decay": 0.1}
NESTEROV = {**SGD, "momentum": 0.9, "nesterov": True, "maximize": True}
LION = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
RULES = {
    "amsgrad": Rule(
        partial(zero_optim.ShardedAdamW, amsgrad=True, **ADAM), partial(torch.optim.AdamW, amsgrad=True, **ADAM), 1e-2
    ),
    "adam": Rule(partial(zero_optim.ShardedAdam, **ADAM), partial(torch.optim.Adam, **ADAM), 1e-2),
    "lion": Rule(partial(zero_optim.ShardedLion, **LION), partial(PaperLion, **LION), 1e-3),
    "sgd": Rule(partial(zero_optim.ShardedSGD, **SGD), partial(torch.optim.SGD, **SGD), 1e-1),
    "momentum": Rule(
        partial(zero_optim.ShardedSGD, momentum=0.9, dampening=0.25, **SGD),
        partial(torch.optim.SGD, momentum=0.9, dampening=0.25, **SGD),
        1e-1,
    ),
    "nesterov": Rule(partial(zero_optim.ShardedSGD, **NESTEROV), partial(torch.optim.SGD, **NESTEROV), 1e-1),
}


def _gradients(params: list[Any], step: int) -> list[Tensor | None]:
    """Of few bits, so that averaging is exact."""
    grads: list[Tensor | None] = list(make_gradients(params, 0, step, grid=1))
    if step % 2:
        grads[SOMETIMES] = None
    return grads


def _model(dtype: torch.dtype, rule: str, **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = make(SHAPES, dtype)
    return params, RULES[rule].make(params, bucket_cap_mb=TINY_CAP_MB, **options)


def _train(params: list[nn.Parameter], opt: Any, steps: range) -> None:
    for step in steps:
        linear_backward(params, _gradients(params, step))
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("rule", ["amsgrad", "adam", "momentum", "nesterov", "sgd"])
def test_a_job_moves_to_torch_and_back(rule: str) -> None:
    params, opt = _model(torch.float32, rule)
    _train(params, opt, range(STEPS))
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    torchs = RULES[rule].oracle(theirs)
    torchs.load_state_dict(zero_optim.full_state_dict(opt))
    again, back = _model(torch.float32, rule)
    with torch.no_grad():
        for p, value in zip(again, theirs, strict=True):
            p.copy_(value)
    zero_optim.load_full_state_dict(back, copy.deepcopy(torchs.state_dict()))
    for step in range(STEPS, STEPS + 3):
        for p, grad in zip(theirs, _gradients(theirs, step), strict=True):
            p.grad = grad
        torchs.step()
    _train(params, opt, range(STEPS, STEPS + 3))
    _train(again, back, range(STEPS, STEPS + 3))
    bounds = [7 * EPS * (2 * p.detach().abs() + 32 * RULES[rule].size) for p in theirs]
    assert_within(copies(params), copies(theirs), bounds, rule)
    assert_bitwise(copies(again), copies(params), rule)


@pytest.mark.parametrize(
    ("make_it", "told"),
    [
        (lambda p: zero_optim.ShardedSGD(p, nesterov=True), "nesterov of parameter group 0 needs a momentum"),
        (lambda p: zero_optim.ShardedSGD(p, momentum=-1), "momentum of parameter group 0 must be 0 or more, got -1"),
        (lambda p: zero_optim.ShardedLion(p, betas=(0.9, 1.0)), "betas of parameter group 0 must be two numbers"),
        (lambda p: zero_optim.ShardedLion(p, lr=-1.0), "lr of parameter group 0 must be 0 or more"),
        (
            lambda p: zero_optim.ShardedAdamW([{"params": p, "amsgrad": True}]),
            "amsgrad of parameter group 0 is True, and the optimizer was made with False",
        ),
        (lambda p: zero_optim.ShardedSGD(p, differentiable=True), "differentiable of parameter group 0"),
    ],
)
def test_options_out_of_range_are_named(make_it: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_it([nn.Parameter(torch.ones(3))])


def test_what_is_no_rule_or_no_option_is_refused() -> None:
    p = [nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match=r"rule must be an instance of zero_optim\.rules\.UpdateRule"):
        zero_optim.ShardedOptimizer(p, zero_optim.rules.Lion)
    with pytest.raises(TypeError, match="Lion has no option 'eps': it has lr, betas, weight_decay, maximize"):
        zero_optim.rules.Lion(eps=1e-8)


def test_momentum_cannot_come_later_where_no_buffers_are() -> None:
    params = make(SHAPES)
    opt = zero_optim.ShardedSGD(params, lr=0.1)
    assert "momentum_buffer" not in opt.stats()["memory"]
    opt.param_groups[0]["momentum"] = 0.9
    linear_backward(params, _gradients(params, 0))
    with pytest.raises(ValueError, match="momentum of parameter group 0 is 0.9, and the optimizer was made without"):
        opt.step()


def test_one_group_with_momentum_gives_buffers_to_all() -> None:
    params = make(SHAPES)
    groups = [{"params": params[:3], "momentum": 0.9}, {"params": params[3:]}]
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    opt = zero_optim.ShardedSGD(groups, lr=0.1)
    torchs = torch.optim.SGD([{"params": theirs[:3], "momentum": 0.9}, {"params": theirs[3:]}], lr=0.1)
    for step in range(3):
        grads = make_gradients(params, 0, step)
        linear_backward(params, grads)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad
        opt.step()
        torchs.step()
        opt.zero_grad()
    assert_within(copies(params), copies(theirs), [3 * EPS * (2 * p.abs() + 32) for p in copies(theirs)], "sgd")


def test_state_of_another_rule_is_refused(tmp_path: Any) -> None:
    params, opt = _model(torch.bfloat16, "lion")
    _train(params, opt, range(2))
    model = nn.ParameterList(params)
    zero_optim.checkpoint.save(str(tmp_path), model, opt)
    full = zero_optim.full_state_dict(opt)
    opt.close()
    adam = zero_optim.ShardedAdamW(model.parameters())
    with pytest.raises(zero_optim.StateMismatchError, match="exp_avg_sq"):
        zero_optim.checkpoint.load(str(tmp_path), model, adam)
    with pytest.raises(zero_optim.StateMismatchError, match="exp_avg_sq"):
        zero_optim.load_full_state_dict(adam, full)
    adam.close()
    largest = zero_optim.ShardedAdamW(model.parameters(), amsgrad=True)
    with pytest.raises(zero_optim.StateMismatchError):
        zero_optim.load_full_state_dict(largest, torch.optim.AdamW(make(SHAPES)).state_dict())


def test_the_planner_asks_the_rule(capsys: Any) -> None:
    for rule in RULES:
        params, opt = _model(torch.bfloat16, rule, ema_decay=(0.9, 0.99), master="fp32")
        _train(params, opt, range(2))
        made, memory = zero_optim.memory.plan_of(opt), opt.stats()["memory"]
        for tensor in opt.engine.rules.all[0].tensors:
            assert made.memory[tensor.name] == memory[tensor.name] == 4 * sum(p.numel() for p in params), tensor
        opt.close()
    flags = ["plan", "--params", "1e9", "--world", "4", "--stage", "2", "--master", "fp32", "--json"]
    for optimizer, averages, kinds in (("adamw", 0, 3), ("lion", 1, 3), ("sgd", 0, 1), ("momentum", 2, 4)):
        assert cli.main([*flags, "--optimizer", optimizer, "--averages", str(averages)]) == 0
        (made,) = json.loads(capsys.readouterr().out)
        state = made["model_state_bytes"] - made["bytes_per_rank"]["parameters"] - made["bytes_per_rank"]["gradients"]
        assert state == pytest.approx(kinds * 1e9, rel=1e-3), optimizer
    assert cli.main([*flags, "--averages", "-1"]) == 2
    assert "--averages -1: at least 0" in capsys.readouterr().err


def test_a_rule_of_ones_own_has_a_name_of_its_own() -> None:
    class Lion(zero_optim.rules.UpdateRule):
        tensors = ()

    with pytest.raises(TypeError, match="checkpoints would take it for the Lion of zero_optim.rules"):
        zero_optim.ShardedOptimizer([nn.Parameter(torch.ones(3))], Lion())


def test_momentum_buffers_that_are_none_are_none() -> None:
    params, opt = _model(torch.float32, "momentum")
    _train(params, opt, range(2))
    full = zero_optim.full_state_dict(opt)
    full["state"][1] = {"momentum_buffer": None}
    zero_optim.load_full_state_dict(opt, full)
    state = zero_optim.full_state_dict(opt)["state"]
    assert 1 not in state and set(state) == {0, 2, 3, 4, 5}


def _unlike(rank: int, world_size: int) -> list[str]:
    """Other momentum with the same state; then other state."""
    told = []
    for groups, momentum in (([0.8, 0.9], 0.9), ([0.0, 0.9], 0.0)):
        own = [{"params": make(SHAPES), "momentum": groups[rank]}]
        with pytest.raises(zero_optim.RankMismatchError) as raised:
            zero_optim.ShardedSGD(own, lr=torch.tensor(0.1), momentum=momentum)
        told.append(str(raised.value))
    return told


def test_ranks_with_other_momentum_are_told_where_the_rate_is_a_tensor() -> None:
    for values, state in run_ranks(2, _unlike):
        assert "'momentum': 0.8" in values and "'momentum': 0.9" in values
        assert "momentum_buffer" in state
