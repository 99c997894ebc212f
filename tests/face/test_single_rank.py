"""Without torch.distributed it is a plain optimizer: torch's own weights, with everything that clients do to one."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from oracle import Hyper, MasterAdamW, adamw_bound
from torch import nn
from torch.optim import lr_scheduler
from training_cases import (
    assert_bitwise,
    assert_within,
    linear_backward,
    linear_loss,
    make_gradients,
    make_parameters,
    named,
)

STEPS = 12
LR = 1e-2


def _train(
    opt: Any, params: list[nn.Parameter], scheduler: Any = None, steps: int = STEPS, first: int = 0
) -> list[float]:
    """The lr of each step."""
    rates = []
    for step in range(first, first + steps):
        opt.zero_grad()
        linear_backward(params, make_gradients(params, 0, step))
        opt.step()
        rates.append(float(opt.param_groups[0]["lr"]))
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(math.sin(step))
        elif scheduler is not None:
            scheduler.step()
    return rates


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3, 0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5], 0.3),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.25, 4),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, 1.0, 6),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 10, 2.0),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 8, 1e-4),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-2, 3),  # moves betas too
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 2e-2, total_steps=STEPS + 1),  # moves betas too
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.5),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(opt, 0.9)], [4]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 3), lr_scheduler.ExponentialLR(opt, 0.95)], optimizer=opt
    ),
}


def test_every_scheduler_of_torch_is_in_the_table():
    classes = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler", "SWALR"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_give_the_same_rates_and_weights(name):
    ours, theirs = make_parameters(), make_parameters()
    opt = zero_optim.ShardedAdamW(ours, lr=LR)
    adamw = torch.optim.AdamW(theirs, lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it does not see an optimizer's step
        warnings.filterwarnings(
            "ignore", message=".*lr_scheduler.step.*deprecated|.*EPOCH_DEPRECATION.*|.*epoch parameter.*"
        )
        rates = _train(opt, ours, SCHEDULERS[name](opt))
        expected = _train(adamw, theirs, SCHEDULERS[name](adamw))
    assert rates == expected
    assert_within(ours, theirs, [adamw_bound(p.detach(), 2e-2, STEPS) for p in theirs], name)
    opt.close()


def test_swalr_with_an_averaged_model():
    ours, theirs = make_parameters(), make_parameters()
    opt, adamw = zero_optim.ShardedAdamW(ours, lr=LR), torch.optim.AdamW(theirs, lr=LR)
    rates = _train(opt, ours, torch.optim.swa_utils.SWALR(opt, 1e-3, 4))
    assert rates == _train(adamw, theirs, torch.optim.swa_utils.SWALR(adamw, 1e-3, 4))
    assert_within(ours, theirs, [adamw_bound(p.detach(), LR, STEPS) for p in theirs], "SWALR")
    opt.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_l2_form_is_torchs_adam(weight_decay, stage):
    ours, theirs = make_parameters(), make_parameters()
    opt = zero_optim.ShardedAdamW(ours, lr=LR, weight_decay=weight_decay, decoupled_weight_decay=False, stage=stage)
    _train(opt, ours)
    _train(torch.optim.Adam(theirs, lr=LR, weight_decay=weight_decay), theirs)
    # With the decay in the gradient an update feels the parameter's last bit, sharply where the two cancel.
    bounds = [4 * adamw_bound(p.detach(), LR, STEPS) for p in theirs]
    assert_within(ours, theirs, bounds, "against torch.optim.Adam")

    oracle_params = make_parameters()
    oracle = MasterAdamW(oracle_params, Hyper(lr=LR, weight_decay=weight_decay, decoupled=False))
    for step in range(STEPS):
        oracle.step(make_gradients(oracle_params, 0, step))
    assert_bitwise(ours, oracle.params)
    opt.close()


@pytest.mark.parametrize("entries", ["list", "generator", "named", "groups", "one tensor group"])
def test_ways_of_giving_parameters(entries):
    params = make_parameters()
    given: Any = {
        "list": params,
        "generator": (p for p in params),
        "named": iter(named(params)),
        "groups": [{"params": params[:3]}, {"params": named(params[3:]), "lr": LR}],
        "one tensor group": [{"params": p} for p in params],
    }[entries]
    if entries == "groups":  # torch allows names in all groups or in none
        given[0]["params"] = named(params[:3])
        given[1]["params"] = named(params[3:], "other")
    opt = zero_optim.ShardedAdamW(given, lr=LR)
    _train(opt, params, steps=2)
    oracle = MasterAdamW(make_parameters(), Hyper(lr=LR))
    for step in range(2):
        oracle.step(make_gradients(params, 0, step))
    assert_bitwise(params, oracle.params)
    opt.close()


def test_step_returns_the_loss_of_its_closure():
    opt = zero_optim.ShardedAdamW(make_parameters(), lr=LR)
    assert opt.step(lambda: 3.0) == 3.0 and opt.step() is None
    opt.close()


def test_torchs_own_scaler_works_with_one_rank():
    ours, theirs = make_parameters(), make_parameters()
    results = []
    for params, make in ((ours, zero_optim.ShardedAdamW), (theirs, torch.optim.AdamW)):
        opt = make(params, lr=LR)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(5):
            opt.zero_grad()
            grads = make_gradients(params, 0, step)
            if step == 3:
                grads[0].view(-1)[0] = float("inf")
            scaler.scale(linear_loss(params, grads)).backward()
            scaler.step(opt)
            scaler.update()
        results.append(scaler.get_scale())
    assert results[0] == results[1] == 64.0
    assert_within(ours, theirs, [adamw_bound(p.detach(), LR, 5) for p in theirs], "weights")


def test_our_scaler_has_torchs_interface_and_state():
    theirs = torch.amp.GradScaler("cpu", init_scale=128.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    ours = zero_optim.GradScaler(init_scale=128.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    public = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")}
    assert public <= set(dir(ours))
    assert ours.state_dict() == theirs.state_dict()
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(ours.state_dict())
    assert fresh.state_dict() == theirs.state_dict()
    loaded = zero_optim.GradScaler()
    loaded.load_state_dict(theirs.state_dict())
    assert loaded.state_dict() == theirs.state_dict()
    assert (
        loaded.get_scale(),
        loaded.get_growth_factor(),
        loaded.get_backoff_factor(),
        loaded.get_growth_interval(),
    ) == (128.0, 3.0, 0.25, 7)
    assert loaded.is_enabled()
    loaded.set_growth_factor(4.0)
    loaded.set_backoff_factor(0.125)
    loaded.set_growth_interval(9)
    assert (loaded.get_growth_factor(), loaded.get_backoff_factor(), loaded.get_growth_interval()) == (4.0, 0.125, 9)
    zero_optim.GradScaler("cpu", init_scale=2.0)  # torch's positions
    zero_optim.GradScaler(device="cpu", enabled=False)


def test_a_disabled_scaler_passes_everything_through():
    params = make_parameters()
    opt = zero_optim.ShardedAdamW(params, lr=LR)
    scaler = zero_optim.GradScaler(enabled=False)
    loss = linear_loss(params, make_gradients(params, 0, 0))
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    oracle = MasterAdamW(make_parameters(), Hyper(lr=LR))
    oracle.step(make_gradients(params, 0, 0))
    assert_bitwise(params, oracle.params)
    opt.close()


def test_a_model_trains_through_views_saved_and_shared():
    """State dicts, deep copies and strides of a flattened model are an ordinary model's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    shapes = {name: (p.shape, p.stride(), p.is_contiguous()) for name, p in model.named_parameters()}
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=LR)
    assert {name: (p.shape, p.stride(), p.is_contiguous()) for name, p in model.named_parameters()} == shapes
    twin = copy.deepcopy(model)
    model(torch.ones(3, 4)).sum().backward()
    opt.step()
    assert not torch.equal(model[0].weight, twin[0].weight), "a deep copy is apart"
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model[0].weight, twin[0].weight)
    opt.close()


def test_a_parameter_that_is_not_contiguous():
    params = [nn.Parameter(torch.arange(12.0).reshape(3, 4).t()), nn.Parameter(torch.ones(5))]
    oracle = MasterAdamW([p.detach().contiguous() for p in params], Hyper(lr=LR))
    opt = zero_optim.ShardedAdamW(params, lr=LR)
    grads = [torch.arange(12.0).reshape(4, 3) - 5, torch.ones(5)]
    for _ in range(3):
        linear_backward(params, grads)
        opt.step()
        opt.zero_grad()
        oracle.step(grads)
    assert_bitwise(params, oracle.params)
    opt.close()


def test_attach_names_parameters_afterwards():
    model = nn.Sequential(nn.Linear(3, 2))
    opt = zero_optim.ShardedAdamW(model.parameters())
    assert set(opt.state_dict()["state"]) <= {0, 1}
    opt.attach(model)
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert set(opt.state_dict()["state"]) == {"0.weight", "0.bias"}
    opt.close()


def test_importing_starts_no_process_group():
    code = (
        "import zero_optim, torch.distributed as d; assert not (d.is_available() and d.is_initialized()); print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "fine", done.stderr


def test_stats_count_what_is_trained():
    model = nn.Sequential(nn.Linear(128, 4, bias=False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 32, bias=False))
    model[0].requires_grad_(False)
    opt = zero_optim.ShardedAdamW(model.parameters())
    memory = opt.stats()["memory"]
    assert [memory[kind] for kind in ("parameters", "exp_avg", "exp_avg_sq")] == [4 * 128] * 3


# -- many parameters ---------------------------------------------------------------------------------------------------


def _calls(work: Callable[[], object]) -> int:
    """Count the functions that are called, of Python and of C."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _calls_by_name(parameters: int, folder: Path) -> dict[str, int]:
    """The calls of what goes through all parameters, by its name."""
    model = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(parameters)])
    made: list[zero_optim.ShardedAdamW] = []
    found = {"construct": _calls(lambda: made.append(zero_optim.ShardedAdamW(model.named_parameters())))}
    (opt,) = made
    torch.stack([p.sum() for p in model]).sum().backward()
    opt.step()
    state, full = opt.state_dict(), zero_optim.full_state_dict(opt)
    work: dict[str, Callable[[], object]] = {
        "state_dict": opt.state_dict,
        "load_state_dict": lambda: opt.load_state_dict(state),
        "full_state_dict": lambda: zero_optim.full_state_dict(opt),
        "load_full_state_dict": lambda: zero_optim.load_full_state_dict(opt, full),
        "save": lambda: zero_optim.checkpoint.save(folder, model, opt),
        "load": lambda: zero_optim.checkpoint.load(folder, model, opt),
        "info": lambda: zero_optim.checkpoint.info(folder),
        "attach": lambda: opt.attach(model),
        "zero_grad": opt.zero_grad,
        "clip_grad_norm_": lambda: opt.clip_grad_norm_(1.0, 2.0, [*model][::2]),
        "close": opt.close,
    }
    return found | {name: _calls(do) for name, do in work.items()}


@pytest.mark.slow
def test_what_a_parameter_costs_does_not_grow_with_their_number(tmp_path: Path) -> None:
    _calls_by_name(10, tmp_path / "first")  # what is imported and cached then is not counted
    some, more, most = (_calls_by_name(count, tmp_path / str(count)) for count in (40, 80, 160))
    for name in some:
        first, second = more[name] - some[name], most[name] - more[name]
        assert second <= 2.2 * first + 100, f"{name}: {some[name]}, {more[name]}, {most[name]}"
