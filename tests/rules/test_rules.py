"""Every rule of the package against torch's optimizer, or its paper: at all stages, in all stores, saved and moved."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import oracle_float64
import pytest
import torch
import zero_optim
from harness import run_ranks
from oracle import PaperLion
from sharded_cases import GivenNet
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

# rule, stage, dtype, store
CASES = (
    ("amsgrad", 0, torch.float32, None),
    ("amsgrad", 2, torch.bfloat16, "nvme"),
    ("amsgrad", 3, torch.float16, "cpu"),
    ("adam", 2, torch.float32, "paged"),
    ("lion", 0, torch.bfloat16, None),
    ("lion", 1, torch.float32, "cpu"),
    ("lion", 3, torch.bfloat16, "paged"),
    ("sgd", 0, torch.float16, "paged"),
    ("sgd", 2, torch.bfloat16, "cpu"),
    ("sgd", 3, torch.float32, None),
    ("momentum", 1, torch.bfloat16, "paged"),
    ("momentum", 3, torch.float32, "nvme"),
    ("nesterov", 2, torch.bfloat16, None),
    ("nesterov", 1, torch.float16, "nvme"),
)


def _gradients(params: list[Any], step: int) -> list[Tensor | None]:
    """Of few bits, so that averaging is exact."""
    grads: list[Tensor | None] = list(make_gradients(params, 0, step, grid=1))
    if step % 2:
        grads[SOMETIMES] = None
    return grads


def _model(
    stage: int, dtype: torch.dtype, rule: str, **options: Any
) -> tuple[list[nn.Parameter], Callable[..., None], Any]:
    """The parameters, what makes a backward with given gradients, and the optimizer."""
    if stage < 3:
        params = make(SHAPES, dtype)
        opt = RULES[rule].make(params, stage=stage, bucket_cap_mb=TINY_CAP_MB, **options)
        return params, partial(linear_backward, params), opt
    model = GivenNet([SHAPES[:2], SHAPES[2:4], SHAPES[4:]], dtype)
    zero_optim.shard_module(model, units=(type(model.units[0]),))
    opt = RULES[rule].make(model.parameters(), **options)
    return list(model.parameters()), lambda grads: model(grads).backward(), opt


def _train(backward: Callable[..., None], opt: Any, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        factor = world_size if rank == 0 else 0
        backward([None if g is None else g * factor for g in _gradients(make(SHAPES, torch.float32), step)])
        opt.step()
        opt.zero_grad()


def _oracle(rule: str, dtype: torch.dtype, steps: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """fp32 masters, and torch's optimizer over them."""
    masters = [nn.Parameter(p.float()) for p in make(SHAPES, dtype)]
    opt = RULES[rule].oracle(masters)
    for step in range(steps):
        for master, grad in zip(masters, _gradients(masters, step), strict=True):
            master.grad = None if grad is None else grad.to(dtype).float()
        opt.step()
    return copies(masters), opt


def _offload(store: str | None, folder: str) -> str | None:
    return f"nvme:{folder}" if store == "nvme" else store


def _run_all(rank: int, world_size: int, folder: str) -> list[tuple[dict[str, Any], Any]]:
    found = []
    for rule, stage, dtype, store in CASES:
        _, backward, opt = _model(stage, dtype, rule, state_offload=_offload(store, folder))
        with oracle_float64.watch(opt) as watching:
            _train(backward, opt, range(STEPS), rank, world_size)
            report = watching.report()
        found.append((zero_optim.full_state_dict(opt, rank=None), report, _whole(opt)))
        opt.close()
    return found


def _whole(opt: Any) -> list[Tensor]:
    """Collective. The parameters, as they are."""
    params = [p for group in opt.param_groups for p in group["params"]]
    model = nn.ParameterList(params) if opt.stage < 3 else opt.engine.sharded_model.model
    found = {name: value.clone() for name, value in zero_optim.iter_full_parameters(model)}
    return [found[name] for name, _ in model.named_parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rule_computes_what_torch_or_its_paper_says(world_size: int, tmp_path: Any) -> None:
    for of_rank in run_ranks(world_size, _run_all, str(tmp_path)):
        for (rule, stage, dtype, store), (full, report, seen) in zip(CASES, of_rank, strict=True):
            what = f"{rule} at stage {stage} of {dtype}, {store}"
            expected, oracle = _oracle(rule, dtype, STEPS)
            state = full["state"]
            masters = [state[i].get("master", p) for i, p in enumerate(seen)]
            bounds = [STEPS * EPS * (2 * p.abs() + 32 * RULES[rule].size) for p in expected]
            assert_within(masters, expected, bounds, what)
            assert_bitwise(seen, [master.to(dtype) for master in masters], what)
            assert report.compared > 0 and report.elements.of_bound <= 1, (what, report)
            assert report.unrounded == 0, what
            for index, own in enumerate(oracle.state.values()):
                for name, value in own.items():
                    if isinstance(value, Tensor) and name != "step":
                        assert torch.allclose(state[index][name], value, rtol=1e-5, atol=1e-7), (what, name)
                kept = {name for name, value in own.items() if isinstance(value, Tensor)} | {"step"}
                assert set(state[index]) - {"master"} == kept, what
                assert float(state[index]["step"]) == (STEPS // 2 if index == SOMETIMES else STEPS), what


@pytest.mark.parametrize("rule", ["amsgrad", "adam", "momentum", "nesterov", "sgd"])
def test_a_job_moves_to_torch_and_back(rule: str) -> None:
    params, backward, opt = _model(2, torch.float32, rule)
    _train(backward, opt, range(STEPS), 0, 1)
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    torchs = RULES[rule].oracle(theirs)
    torchs.load_state_dict(zero_optim.full_state_dict(opt))
    again, again_backward, back = _model(2, torch.float32, rule)
    with torch.no_grad():
        for p, value in zip(again, theirs, strict=True):
            p.copy_(value)
    zero_optim.load_full_state_dict(back, copy.deepcopy(torchs.state_dict()))
    for step in range(STEPS, STEPS + 3):
        for p, grad in zip(theirs, _gradients(theirs, step), strict=True):
            p.grad = grad
        torchs.step()
    _train(backward, opt, range(STEPS, STEPS + 3), 0, 1)
    _train(again_backward, back, range(STEPS, STEPS + 3), 0, 1)
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
    params, backward, opt = _model(2, torch.bfloat16, "lion")
    _train(backward, opt, range(2), 0, 1)
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
        params, backward, opt = _model(2, torch.bfloat16, rule, ema_decay=(0.9, 0.99), master="fp32")
        _train(backward, opt, range(2), 0, 1)
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
    params, backward, opt = _model(2, torch.float32, "momentum")
    _train(backward, opt, range(2), 0, 1)
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
