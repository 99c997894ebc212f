"""Exponential averages of the masters: values, who changes them, where they go, and the parameters being them."""

from __future__ import annotations

import copy
import math
import re
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from harness import run_ranks
from safetensors.torch import load_file
from sharded_cases import GivenNet
from torch import Tensor, nn
from training_cases import TINY_CAP_MB, assert_bitwise, linear_backward, make_gradients, make_parameters, named
from zero_optim import cli

SHAPES = ((17, 9), (300,), (5, 3, 2), (40, 25))
SOMETIMES = 1
DECAYS = ((0.9, 0.5), (0.75, 0.25))  # of the two groups, of each average

# stage, dtype, store, rule
CASES = (
    (0, torch.float32, None, zero_optim.ShardedSGD),
    (1, torch.bfloat16, "cpu", zero_optim.ShardedAdamW),
    (2, torch.float32, "paged", zero_optim.ShardedLion),
    (2, torch.bfloat16, None, zero_optim.ShardedAdamW),
    (3, torch.bfloat16, None, zero_optim.ShardedAdamW),
    (3, torch.float32, "cpu", zero_optim.ShardedAdamW),
)


def _make(stage: int, dtype: torch.dtype, store: str | None, rule: Any) -> tuple[Any, Any, Any]:
    """Names and parameters, what makes a backward, and the optimizer."""
    if stage < 3:
        params = make_parameters(SHAPES, dtype)
        entries, backward = named(params), lambda grads: linear_backward(params, grads)
    else:
        model = GivenNet([SHAPES[:2], SHAPES[2:3], SHAPES[3:]], dtype)
        zero_optim.shard_module(model, units=(type(model.units[0]),))
        entries, backward = [*model.named_parameters()], lambda grads: model(grads).backward()
    groups = [{"params": entries[:2], "ema_decay": DECAYS[0]}, {"params": entries[2:]}]
    cap = {} if stage == 3 else {"stage": stage, "bucket_cap_mb": TINY_CAP_MB}
    opt = rule(groups, lr=1e-2, state_offload=store, ema_decay=DECAYS[1], **cap)
    return entries, backward, opt


def _life(rank: int, world_size: int) -> None:
    for case in CASES:
        entries, backward, opt = _make(*case)
        names = [name for name, _ in entries]
        masters = _masters(opt)
        averages = [[p.clone() for p in masters] for _ in range(2)]
        for step in range(5):
            grads: list[Any] = make_gradients([torch.empty(shape) for shape in SHAPES], rank, step)
            if step == 2:
                grads[SOMETIMES] = None
            if step == 3 and rank == 0:
                grads[0][0, 0] = math.inf
            backward(grads)
            opt.step()
            opt.zero_grad()
            before, masters = masters, _masters(opt)
            for which, own in enumerate(averages):
                for index, p in enumerate(masters):
                    if step == 3 or (step == 2 and index == SOMETIMES):
                        assert torch.equal(p, before[index])
                        continue
                    if step == 0:
                        own[index] = own[index] + (p - own[index])
                        continue
                    rate = torch.tensor(1 - DECAYS[index > 1][which], dtype=torch.float64).float()
                    own[index] = own[index] + rate * (p - own[index])
        for which, own in enumerate(averages):
            found = opt.ema_state_dict(which, rank=None)
            assert_bitwise([found[name] for name in names], own, f"average {which} of {case}")
        last = world_size - 1
        assert (opt.ema_state_dict(rank=last) == {}) == (rank != last)
        _look(opt, averages[1], case)
        opt.close()


def _masters(opt: Any) -> list[Tensor]:
    """Collective. What the parameters are roundings of, all whole."""
    params = [p for group in opt.param_groups for p in group["params"]]
    model = nn.ParameterList(params) if opt.stage < 3 else opt.engine.sharded_model.model
    found = {name: v.clone() for name, v in zero_optim.iter_full_parameters(model, opt, torch.float32)}
    return [found[name] for name, _ in model.named_parameters()]


def _parameters(opt: Any) -> list[Tensor]:
    """Collective. The parameters themselves, whole."""
    params = [p for group in opt.param_groups for p in group["params"]]
    model = nn.ParameterList(params) if opt.stage < 3 else opt.engine.sharded_model.model
    found = {name: v.clone() for name, v in zero_optim.iter_full_parameters(model)}
    return [found[name] for name, _ in model.named_parameters()]


def _look(opt: Any, averages: list[Tensor], case: Any) -> None:
    before, masters = _parameters(opt), _masters(opt)
    with opt.swap_to_ema(1):
        seen = _parameters(opt)
        assert_bitwise(seen, [average.to(p.dtype) for average, p in zip(averages, before, strict=True)], str(case))
        for call in (opt.step, lambda: zero_optim.full_state_dict(opt), lambda: opt.swap_to_ema().__enter__()):
            with pytest.raises(zero_optim.ZeroOptimError, match=r"within swap_to_ema\(\)"):
                call()
    assert_bitwise(_parameters(opt), before, str(case))
    assert_bitwise(_masters(opt), masters, str(case))


@pytest.mark.parametrize("world_size", [1, 2])
def test_averages_follow_the_masters_and_show_themselves(world_size: int) -> None:
    run_ranks(world_size, _life)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.frozen = nn.Linear(12, 9), nn.Linear(9, 3).requires_grad_(False)
        self.to(torch.bfloat16)


def _optimizer(model: nn.Module, **options: Any) -> Any:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return zero_optim.ShardedAdamW(trained, lr=0.05, **options)


def _save(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    model = Model()
    opt = _optimizer(model, ema_decay=0.5)
    for step in range(3):
        linear_backward([*model.one.parameters()], make_gradients([*model.one.parameters()], rank, step))
        opt.step()
        opt.zero_grad()
    zero_optim.checkpoint.save(f"{folder}/with", model, opt)
    without = _optimizer(other := Model())
    full = zero_optim.full_state_dict(opt)
    zero_optim.load_full_state_dict(without, _without_average(full) if rank == 0 else None)
    zero_optim.checkpoint.save(f"{folder}/without", other, without)
    without.close()
    return opt.ema_state_dict(rank=None)


def _without_average(full: dict[str, Any]) -> dict[str, Any]:
    for entry in full["state"].values():
        for name in [name for name in entry if name.startswith("ema")]:
            del entry[name]
    for group in full["param_groups"]:
        del group["ema_decay"]
    return full


def _load(rank: int, world_size: int, folder: str) -> list[Any]:
    model = Model()
    opt = _optimizer(model, ema_decay=0.5, stage=1)
    loaded = zero_optim.checkpoint.load(f"{folder}/with", model, opt)
    found = [opt.ema_state_dict(rank=None), loaded.notes]
    loaded = zero_optim.checkpoint.load(f"{folder}/without", model, opt)
    masters = {n: v.clone() for n, v in zero_optim.iter_full_parameters(model, opt, torch.float32)}
    return [*found, opt.ema_state_dict(rank=None), masters, loaded.notes]


def test_averages_are_saved_and_begin_at_the_parameters_where_they_were_not(tmp_path: Any, capsys: Any) -> None:
    saved = run_ranks(2, _save, str(tmp_path))[0]
    for world_size in (1, 3):
        for average, notes, begun, masters, told in run_ranks(world_size, _load, str(tmp_path)):
            assert_bitwise([average[name] for name in saved], [*saved.values()], "loaded")
            assert "average" not in str(notes)
            assert_bitwise([*begun.values()], [masters[name] for name in begun], "begun")
            assert "averages begin at the parameters" in str(told)
    for flags, dtype in (((), torch.bfloat16), (("--dtype", "fp32"), torch.float32)):
        out = tmp_path / f"out-{dtype}"
        assert cli.main(["export", str(tmp_path / "with"), str(out), "--ema", *flags]) == 0
        written = load_file(out / "model.safetensors")
        for name, value in Model().named_parameters():
            assert torch.equal(written[name], saved.get(name, value.detach()).to(dtype)), name
    assert cli.main(["export", str(tmp_path / "without"), str(tmp_path / "none"), "--ema"]) == 1
    assert "there is no average 'ema' in the checkpoint: it has none" in capsys.readouterr().err


@pytest.mark.parametrize("decay", [1.5, -0.1, (), (0.9, math.nan)])
def test_a_decay_out_of_range_is_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match="ema_decay of parameter group 0"):
        zero_optim.ShardedAdamW([nn.Parameter(torch.ones(3))], ema_decay=decay)


def test_groups_have_as_many_averages_as_the_optimizer() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(3))], "ema_decay": (0.9, 0.99)}]
    with pytest.raises(ValueError, match=r"ema_decay of parameter group 0 must be a number in \[0, 1\]"):
        zero_optim.ShardedAdamW(groups, ema_decay=0.9)
    opt = zero_optim.ShardedAdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="there is no average 0: the optimizer was made with 0"):
        opt.ema_state_dict()


# ---- what goes wrong, and what comes between -----------------------------------------------------------------------


def _trained_once(stage: int, dtype: torch.dtype, store: str | None = None, steps: int = 2) -> Any:
    entries, backward, opt = _make(stage, dtype, store, zero_optim.ShardedAdamW)
    for step in range(steps):
        backward(make_gradients([torch.empty(shape) for shape in SHAPES], 0, step))
        opt.step()
        opt.zero_grad()
    return entries, backward, opt


def _failing_swap(rank: int, world_size: int) -> None:
    from zero_optim.step.shard_state import ShardState

    _, _, opt = _trained_once(2, torch.float32)
    before, masters = _parameters(opt), _masters(opt)
    opened, calls = ShardState.opened, []

    def failing(self: Any) -> Any:
        calls.append(self)
        if rank == 0 and len(calls) == 3:
            raise torch.OutOfMemoryError("no memory for this one")
        return opened(self)

    with mock.patch.object(ShardState, "opened", failing):
        with pytest.raises(Exception, match="no memory for this one") as raised, opt.swap_to_ema():
            raise AssertionError("never within")
        assert len(calls) >= 3
    assert isinstance(raised.value, torch.OutOfMemoryError if rank == 0 else zero_optim.RankMismatchError)
    assert_bitwise(_parameters(opt), before, "restored")
    assert_bitwise(_masters(opt), masters, "masters")
    with opt.swap_to_ema():
        pass
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_swap_that_fails_leaves_the_parameters_as_they_were(world_size: int) -> None:
    run_ranks(world_size, _failing_swap)


def _in_between(rank: int, world_size: int) -> None:
    for stage in (2, 3):
        _, _, opt = _trained_once(stage, torch.bfloat16)
        before = _parameters(opt)
        with opt.swap_to_ema():
            for name, call in {
                "refresh_master": opt.refresh_master,
                "state_dict": opt.state_dict,
                "reset_state": lambda opt=opt: setattr(opt, "state", {}),
            }.items():
                with pytest.raises(zero_optim.ZeroOptimError, match=rf"{re.escape(name)} was called within swap_to"):
                    call()
        assert_bitwise(_parameters(opt), before, "after it")
        if stage == 3 and world_size > 1:  # alone, a rank has whole parameters anyway
            refused = pytest.raises(zero_optim.ShardAccessError, match="swap_to_ema was called within gather_param")
            with zero_optim.gather_parameters(opt.engine.sharded_model.model), refused:
                opt.swap_to_ema().__enter__()
        with opt.swap_to_ema():
            opt.close()
        params = [p for group in opt.param_groups for p in group["params"]]
        model = nn.ParameterList(params) if stage < 3 else opt.engine.sharded_model.model
        found = {name: value.clone() for name, value in zero_optim.iter_full_parameters(model)}
        assert_bitwise([found[name] for name, _ in model.named_parameters()], before, "closed within")


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_would_take_averages_for_parameters_raises(world_size: int) -> None:
    run_ranks(world_size, _in_between)


@pytest.mark.parametrize("store", [None, "paged", "nvme"])
def test_averages_are_shown_in_inference_mode(store: str | None, tmp_path: Any) -> None:
    entries, backward, opt = _trained_once(2, torch.bfloat16, f"nvme:{tmp_path}" if store == "nvme" else store)
    params, before = [p for _, p in entries], _parameters(opt)
    with torch.inference_mode():
        averages = opt.ema_state_dict()
        with opt.swap_to_ema():
            shown = [p.detach().clone() for p in params]
        assert_bitwise(shown, [averages[name].bfloat16() for name, _ in entries], "shown")
        opt.sleep()
        opt.wake()
    assert_bitwise(_parameters(opt), before, "after it")
    backward(make_gradients([torch.empty(shape) for shape in SHAPES], 0, 5))
    opt.step()
    opt.close()


@pytest.mark.parametrize("load", ["full", "own"])
def test_an_average_that_was_not_loaded_begins_with_the_next_update(load: str) -> None:
    """The model may be loaded after the optimizer: until then the parameters are others."""
    _, backward, plain = _trained_once(2, torch.float32)
    full = _without_average(zero_optim.full_state_dict(plain))
    own = _without_average(copy.deepcopy(plain.state_dict()))
    values = _parameters(plain)
    plain.close()
    entries, backward, opt = _make(2, torch.float32, None, zero_optim.ShardedAdamW)
    zero_optim.load_full_state_dict(opt, full) if load == "full" else opt.load_state_dict(own)
    with torch.no_grad():
        for (_, p), value in zip(entries, values, strict=True):
            p.copy_(value)
    assert_bitwise([opt.ema_state_dict()[name] for name, _ in entries], values, "before an update")
    backward(make_gradients([torch.empty(shape) for shape in SHAPES], 0, 3))
    opt.step()
    found = opt.ema_state_dict(1)
    for name, p in entries:
        assert torch.allclose(found[name], p, rtol=0, atol=1e-6), name
    opt.close()


def test_a_decay_in_a_group_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="ema_decay of parameter group 0: the optimizer keeps no averages"):
        zero_optim.ShardedAdamW([{"params": [nn.Parameter(torch.ones(3))], "ema_decay": 0.9}])


@pytest.mark.parametrize("master", [None, "fp32"])
@pytest.mark.parametrize("first", [100.0, math.nan, math.inf])
def test_an_average_begins_with_weights_that_were_initialised_after_the_optimizer_was_made(
    first: float, master: str | None
) -> None:
    parameter = nn.Parameter(torch.full((4,), first, dtype=torch.bfloat16))
    opt = zero_optim.ShardedAdamW([parameter], lr=1e-3, ema_decay=0.9, master=master)
    parameter.data.copy_(torch.tensor([0.1, 0.2, 0.3, 0.7]))
    parameter.grad = torch.ones_like(parameter)
    opt.step()
    state = zero_optim.full_state_dict(opt)["state"][0]
    torch.testing.assert_close(state["ema"], state["master"], rtol=2.0**-22, atol=0)
    opt.close()
