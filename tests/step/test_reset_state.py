"""``reset_state``: moments and step counts start again; masters and averages are kept, or start again as well."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from sharded_cases import GivenNet
from torch import Tensor, nn
from training_cases import TINY_CAP_MB as CAP_MB
from training_cases import assert_bitwise, copies, linear_backward, make_gradients, make_parameters
from training_cases import through_a_file as filed

SHAPES = ((17, 9), (300, 1), (40, 25))  # matrices, for Muon
DECAY = 0.75
RULES: dict[str, Any] = {
    "adamw": partial(zero_optim.ShardedAdamW, lr=1e-2),
    "amsgrad": partial(zero_optim.ShardedAdam, lr=1e-2, amsgrad=True),
    "lion": partial(zero_optim.ShardedLion, lr=1e-3),
    "sgd": partial(zero_optim.ShardedSGD, lr=1e-2, momentum=0.9),
    "muon": partial(zero_optim.ShardedMuon, lr=1e-2),
}
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# rule, dtype, master, state_dtype, store, stage, ranks, keep, keep_ema
CELLS = (
    ("adamw", BF16, "split", "fp32", None, 2, 1, "master", False),
    ("adamw", FP16, "fp32", "int8", "nvme", 3, 2, "master", True),
    ("amsgrad", BF16, "split", "int8", None, 1, 2, None, True),
    ("lion", BF16, "fp32", "bf16", "cpu", 2, 2, None, False),
    ("sgd", FP32, None, "fp32", "paged", 3, 2, "master", True),
    ("muon", BF16, "split8", "fp32", "nvme", 0, 2, "master", False),
    ("muon", BF16, "split", "int8", "paged", 2, 2, "master", True),
    ("adamw", BF16, "split8", "bf16", "cpu", 3, 1, None, True),
)


def _whole(opt: Any, *more: Any) -> list[Tensor]:
    """Collective. The parameters whole, or with ``more`` of ``opt, torch.float32`` what they are rounded from."""
    params = [p for group in opt.param_groups for p in group["params"]]
    model = nn.ParameterList(params) if opt.stage < 3 else opt.engine.sharded_model.model
    values = {name: value.clone() for name, value in zero_optim.iter_full_parameters(model, *more)}
    return [values[name] for name, _ in model.named_parameters()]


def _averages(opt: Any) -> list[Tensor]:
    found = opt.ema_state_dict(rank=None)
    return [found[name] for group in opt.param_groups for name in group["param_names"]]


# -- every rule, form, store and stage ---------------------------------------------------------------------------------


def _as_new(rank: int, world_size: int, cell: Any, folder: str) -> None:
    rule, dtype, master, state_dtype, store, stage, _, keep, keep_ema = cell
    forms = {"master": master, "state_dtype": state_dtype}
    options = {**forms, "ema_decay": DECAY, "state_offload": f"nvme:{folder}" if store == "nvme" else store}
    if stage == 3:
        model: nn.Module = GivenNet([SHAPES[:1], SHAPES[1:2], SHAPES[2:]], dtype)
        zero_optim.shard_module(model, units=(type(model.units[0]),))
    else:
        model = nn.ParameterList(make_parameters(SHAPES, dtype))
        options |= {"stage": stage, "bucket_cap_mb": CAP_MB}
    opt = RULES[rule](model.named_parameters(), **options)

    def backward(step: int) -> None:
        grads: Any = make_gradients([torch.empty(shape, dtype=dtype) for shape in SHAPES], rank, step)
        model(grads).backward() if stage == 3 else linear_backward([*model], grads)

    for step in range(2):
        backward(step)
        opt.step(), opt.zero_grad()
    backward(2)
    full = zero_optim.full_state_dict(opt, rank=None)
    masters, averages = _whole(opt, opt, FP32), _averages(opt)
    opt.reset_state(keep, keep_ema=keep_ema)
    masters = masters if keep else [p.float() for p in _whole(opt)]
    averages = averages if keep_ema else copies(masters)
    assert_bitwise(_whole(opt, opt, FP32), masters, "masters")
    assert_bitwise(_averages(opt), averages, "averages")

    # A new optimizer with these masters, and zeros for all other state.
    twins = [nn.Parameter(p) for p in _whole(opt)]
    twin = RULES[rule](twins, **forms)
    for entry, own in zip(full["state"].values(), masters, strict=True):
        del entry["ema"]
        entry |= {name: own if name == "master" else torch.zeros_like(value) for name, value in entry.items()}
    zero_optim.load_full_state_dict(twin, {**full, **{k: v for k, v in twin.state_dict().items() if k != "state"}})
    for step in range(2, 5):
        if step > 2:
            backward(step)
        linear_backward(twins, make_gradients(twins, rank, step))
        opt.step(), opt.zero_grad(), twin.step(), twin.zero_grad()
        masters = _whole(opt, opt, FP32)
        assert_bitwise(masters, _whole(twin, twin, FP32), f"step {step}")
        averages = [a + (1 - DECAY) * (p - a) for a, p in zip(averages, masters, strict=True)]
        assert_bitwise(_averages(opt), averages, f"averages, step {step}")
    assert {float(entry["step"]) for entry in opt.state_dict()["state"].values()} == {3.0}
    opt.close()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)).replace("torch.", ""))
def test_training_goes_on_as_with_a_new_optimizer(cell: Any, tmp_path: Any) -> None:
    run_ranks(cell[6], _as_new, cell, str(tmp_path))


# -- saved after a reset, and errors -----------------------------------------------------------------------------------


def _reloaded(rank: int, world_size: int, how: str, folder: str) -> list[Tensor]:
    """A new optimizer goes on after the reset, and after a step in which most parameters have no gradient."""
    last = make_parameters([(30, 2)], BF16)  # has its first update in the last step
    model, *others = (nn.ParameterList(make_parameters(SHAPES, BF16, seed) + copies(last)) for seed in range(3))
    make = partial(zero_optim.ShardedAdamW, lr=1e-3, ema_decay=DECAY, bucket_cap_mb=CAP_MB, master="fp32")
    opt = make(model.named_parameters())
    for step, used in enumerate((3, 3, 1, 3, 4)):
        if step == 2:
            opt.reset_state()
        if how and step in (2, 3):
            before, old, model = model, opt, others.pop()
            opt = make(model.named_parameters())
            if how == "full":
                zero_optim.load_full_state_dict(opt, zero_optim.full_state_dict(old))
            elif how == "own":
                opt.load_state_dict(filed(old.state_dict()))
            else:
                zero_optim.checkpoint.save(folder, before, old, step=step)
                zero_optim.checkpoint.load(folder, model, opt)
            opt.reset_state() if step == 2 else None  # once more, before the model is loaded
            model.load_state_dict(before.state_dict())
        grads = make_gradients([*model], rank, step)
        linear_backward([*model][:used], grads[:used])
        opt.step()
        opt.zero_grad()
    return _whole(opt, opt, FP32) + _averages(opt)


@pytest.mark.parametrize("how", ["full", "own", "checkpoint"])
def test_masters_and_averages_of_a_reset_are_saved(how: str, tmp_path: Any) -> None:
    expected = run_ranks(2, _reloaded, "", "")
    for found, own in zip(run_ranks(2, _reloaded, how, str(tmp_path)), expected, strict=True):
        assert_bitwise(found, own, how)


def test_what_cannot_be_reset_raises() -> None:
    opt = zero_optim.ShardedAdamW(make_parameters(SHAPES), ema_decay=DECAY)
    with pytest.raises(ValueError, match="keep must be 'master' or None, got 'masters'"):
        opt.reset_state("masters")
    with opt.swap_to_ema(), pytest.raises(zero_optim.ZeroOptimError, match="reset_state was called within swap_to_ema"):
        opt.reset_state()
    opt.sleep()
    with pytest.raises(zero_optim.ZeroOptimError, match="asleep"):
        opt.reset_state()
    opt.close()
    with pytest.raises(zero_optim.ClosedError):
        opt.reset_state()
