"""Weights edited between steps: a split master has the parameter as its upper half, however that was edited; an fp32
master follows an edit that its parameter's version counter shows, and only an edited parameter's."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor, nn
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    linear_backward,
    make_gradients,
    make_parameters,
    named,
)
from zero_optim.step import shard_state

LR = 1e-2
EDITED = (
    0,
    6,
)  # the parameters that are edited; the others keep what their masters hold below the parameter's last bit


def _value(p: Tensor) -> Tensor:
    return torch.linspace(-2.0, 3.0, p.numel()).reshape(p.shape).to(p.dtype)


@torch.no_grad()
def _copy(params: list[nn.Parameter]) -> None:
    for i in EDITED:
        params[i].copy_(_value(params[i]))


def _detached(params: list[nn.Parameter]) -> None:
    for i in EDITED:
        params[i].detach().copy_(_value(params[i]))


def _load(params: list[nn.Parameter]) -> None:
    """As nn.Module.load_state_dict; the parameters that are not edited are not in the state."""
    module = nn.ParameterList(params)
    module.load_state_dict({str(i): _value(params[i]) for i in EDITED}, strict=False)


@torch.no_grad()
def _arithmetic(params: list[nn.Parameter]) -> None:
    for i in EDITED:
        params[i].zero_()
        params[i].add_(_value(params[i]))


@torch.no_grad()
def _clamp(params: list[nn.Parameter]) -> None:
    """Written, but nothing changed: the masters keep what lies below the parameters' last bit."""
    for p in params:
        p.clamp_(-1e3, 1e3)
    _copy(params)


EDITS: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "copy_": _copy,
    "detach": _detached,
    "load_state_dict": _load,
    "arithmetic": _arithmetic,
    "clamp of all": _clamp,
}


def _edit(
    rank: int, world_size: int, stage: int, dtype: torch.dtype, master: str | None, edit: str, when: str
) -> list[Tensor]:
    """Three steps; in the second, the weights are edited before or after backward."""
    params = make_parameters(SHAPES, dtype)
    opt = zero_optim.ShardedAdamW(params, lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB, master=master)
    for step in range(4):
        if step == 2 and when == "before backward":
            EDITS[edit](params)
        linear_backward(params, make_gradients(params, rank, step))
        if step == 2 and when == "before step":
            EDITS[edit](params)
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params)


def _edit_cells(rank: int, world_size: int, dtype: torch.dtype, master: str | None) -> dict[str, list[Tensor]]:
    return {
        f"stage {stage}, {edit} {when}": _edit(rank, world_size, stage, dtype, master, edit, when)
        for stage in (0, 1, 2)
        for edit in EDITS
        for when in ("before backward", "before step")
    }


def _edited(oracle: MasterAdamW, indices: Sequence[int], value: Callable[[Tensor], Tensor] = _value) -> None:
    for i in indices:
        oracle.params[i] = value(oracle.params[i])
        oracle.wide[i] = oracle.params[i].float()


def _expected(world_size: int, dtype: torch.dtype, master: str | None) -> list[Tensor]:
    oracle = MasterAdamW(make_parameters(SHAPES, dtype), Hyper(lr=LR), split=master is None)
    for step in range(4):
        if step == 2:
            _edited(oracle, EDITED)
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
    return oracle.params


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.bfloat16, None), (torch.bfloat16, "fp32"), (torch.float16, None), (torch.float32, None)],
    ids=["bf16", "bf16, fp32 master", "fp16", "fp32"],
)
def test_edits_through_the_parameter_hold(dtype, master, world_size):
    expected = _expected(world_size, dtype, master)
    for results in run_ranks(world_size, _edit_cells, dtype, master):
        for cell, params in results.items():
            assert_bitwise(params, expected, cell)


def _edit_data(rank: int, world_size: int, stage: int) -> list[Tensor]:
    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB, master="fp32")
    for step in range(3):
        if step == 2:
            for p in params:
                p.data.copy_(_value(p))
            opt.refresh_master()
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params)


@pytest.mark.parametrize("world_size", [1, 2])
def test_refresh_master_takes_edits_that_cannot_be_seen(world_size):
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), Hyper(lr=LR), split=False)
    for step in range(3):
        if step == 2:
            _edited(oracle, range(len(SHAPES)))
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
    for stage in (0, 1, 2):
        for params in run_ranks(world_size, _edit_data, stage):
            assert_bitwise(params, oracle.params, f"stage {stage}")


# -- edits that no version counter shows -------------------------------------------------------------------------------


def _clamped(p: Tensor) -> Tensor:
    return p.clamp(-0.5, 0.5)


def _averaged(p: Tensor) -> Tensor:
    return ((p.float() + _value(p).float()) / 2).to(p.dtype)


def _pruned(p: Tensor) -> Tensor:
    return p * (torch.arange(p.numel()).reshape(p.shape) % 3 > 0).to(p.dtype)


def _extreme(p: Tensor) -> Tensor:
    """0, -0, infinities, NaN and the largest values, each beside elements that stay."""
    largest = torch.finfo(p.dtype).max
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest], dtype=p.dtype)
    edited = p.clone()
    edited.view(-1)[::3] = values.repeat(-(-p.numel() // 21))[: edited.view(-1)[::3].numel()]
    return edited


UNSEEN = {"clamped": _clamped, "averaged": _averaged, "pruned": _pruned, "extreme": _extreme}
STEPS_EDITED = (2, 4)


def _write(params: list[nn.Parameter], edit: Callable[[Tensor], Tensor], assigned: bool) -> None:
    """``assigned``: in new tensors, as ``torch.nn.utils.vector_to_parameters`` does."""
    if assigned:
        new = [edit(p.data).reshape(-1) for p in params]
        nn.utils.vector_to_parameters(torch.cat(new), params)
    else:
        for p in params:
            p.data.copy_(edit(p.data))


def _edit_unseen(
    rank: int, world_size: int, stage: int, dtype: torch.dtype, options: dict[str, Any], assigned: bool = False
) -> tuple[dict[str, list[Tensor]], list[str]]:
    """Parameters that are edited through ``data`` before some steps, by edit; and what is warned of."""
    trained = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, edit in UNSEEN.items():
            params = make_parameters(SHAPES, dtype)
            opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB, **options)
            for step in range(6):
                before, between = step == STEPS_EDITED[0], step == STEPS_EDITED[1]
                if before:
                    _write(params, edit, assigned)
                linear_backward(params, make_gradients(params, rank, step))
                if between:
                    _write(params, edit, assigned)
                opt.step()
                opt.zero_grad()
            opt.close()
            trained[name] = [p.masked_fill(p.isnan(), math.nan) for p in copies(params)]
    return trained, [text for warning in caught if "version counter" in (text := str(warning.message))]


def _expected_unseen(world_size: int, edit: str, *, split: bool) -> list[Tensor]:
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), Hyper(lr=LR), split=split)
    for step in range(6):
        if step in STEPS_EDITED:
            for i, before in enumerate(oracle.params):
                oracle.params[i] = UNSEEN[edit](before)
                own = oracle.wide[i]
                oracle.wide[i] = torch.where(oracle.params[i] == own.to(before.dtype), own, oracle.params[i].float())
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
    return [p.masked_fill(p.isnan(), math.nan) for p in oracle.params]


@pytest.mark.parametrize(
    ("stage", "world_size", "offload"),
    [(2, 1, None), (0, 2, None), (1, 2, None), (2, 2, None), (2, 1, "paged"), (2, 2, "cpu")],
)
@pytest.mark.parametrize("assigned", [False, True], ids=["in place", "assigned"])
def test_a_split_master_takes_every_edit_along(
    stage: int, world_size: int, offload: str | None, assigned: bool
) -> None:
    given = {"state_offload": offload}
    for trained, warned in run_ranks(world_size, _edit_unseen, stage, torch.bfloat16, given, assigned):
        for edit, params in trained.items():
            assert_bitwise(params, _expected_unseen(world_size, edit, split=True), edit)
        assert not warned


def _debug(rank: int, world_size: int, stage: int) -> tuple[dict[str, list[Tensor]], list[str]]:
    with mock.patch.dict(os.environ, {"ZERO_OPTIM_DEBUG": "edits"}):
        return _edit_unseen(rank, world_size, stage, torch.bfloat16, {"master": "fp32"})


@pytest.mark.parametrize(("stage", "world_size"), [(2, 1), (2, 2), (0, 2)])
def test_the_debug_switch_finds_edits_that_an_fp32_master_would_overwrite(stage: int, world_size: int) -> None:
    for trained, warned in run_ranks(world_size, _debug, stage):
        for edit, params in trained.items():
            assert_bitwise(params, _expected_unseen(world_size, edit, split=False), edit)
        assert warned and all("'layer" in text and "opt.refresh_master()" in text for text in warned)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_fp32_master_overwrites_an_edit_that_it_does_not_see(world_size: int) -> None:
    for trained, warned in run_ranks(world_size, _edit_unseen, 2, torch.bfloat16, {"master": "fp32"}):
        oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), Hyper(lr=LR), split=False)
        for step in range(6):
            oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
        assert_bitwise(trained["clamped"], oracle.params)
        assert not warned


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_masters_follow_an_initialisation_once_and_shard_by_shard(ema_decay: float | None) -> None:
    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(named(params), master="fp32", ema_decay=ema_decay)
    with torch.no_grad():
        for parameter in params:
            parameter.fill_(2.0)
    followed = []
    for step in range(3):
        linear_backward(params, make_gradients(params, 0, step))
        with mock.patch.object(shard_state, "_follow", wraps=shard_state._follow) as follow:
            opt.step()
        followed.append(follow.call_count)
    assert followed == [len(opt.engine.states.shards), 0, 0]
    opt.close()
