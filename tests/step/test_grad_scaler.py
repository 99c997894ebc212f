"""Overflow is shared: one rank's inf skips the step on all, bit for bit; the loss scale moves as torch's own does."""

from __future__ import annotations

import pytest
import torch
import zero_optim
from harness import run_ranks
from oracle import averages
from torch import Tensor, nn
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    error_of,
    linear_loss,
    make_gradients,
    make_parameters,
)

SCALE = 64.0
SHAPES = ((17, 9), (300,), (1,), (40, 25))


def _poisoned(grads: list[Tensor], value: float) -> list[Tensor]:
    grads[1].view(-1)[3] = value
    return grads


def _skipped_without_scaler(
    rank: int, world_size: int, stage: int, skip: bool
) -> tuple[list[Tensor], list[Tensor], int]:
    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=TINY_CAP_MB, skip_nonfinite=skip)
    linear_loss(params, make_gradients(params, rank, 0)).backward()
    opt.step()
    opt.zero_grad()
    before = copies(params)
    grads = make_gradients(params, rank, 1)
    linear_loss(params, _poisoned(grads, float("nan")) if rank == 0 else grads).backward()
    opt.step()
    opt.zero_grad()
    skipped = int(opt.stats()["skipped_steps"])
    opt.close()
    return before, copies(params), skipped


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_a_scaler_too_unless_let_through(stage):
    for before, after, skipped in run_ranks(2, _skipped_without_scaler, stage, True):
        assert_bitwise(after, before)
        assert skipped == 1
    for before, after, skipped in run_ranks(2, _skipped_without_scaler, stage, False):
        assert skipped == 0
        assert after[1].isnan().sum() == 1
        assert not torch.equal(before[0], after[0])
        assert not any(p.isnan().any() for p in (after[0], after[2], after[3]))


def _unscaled_gradients(rank: int, world_size: int, stage: int) -> list[Tensor]:
    params = make_parameters(SHAPES, torch.float32)
    opt = zero_optim.ShardedAdamW(params, stage=stage)
    scaler = zero_optim.GradScaler(init_scale=SCALE)
    scaler.scale(linear_loss(params, make_gradients(params, rank, 0))).backward()
    scaler.unscale_(opt)
    grads = copies(p.grad for p in params)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(opt)
    opt.close()
    return grads


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 1), (1, 2), (2, 0)])
def test_readable_gradients_are_really_divided(world_size, stage):
    like = make_parameters(SHAPES, torch.float32)
    expected = averages([make_gradients(like, rank, 0) for rank in range(world_size)])
    for grads in run_ranks(world_size, _unscaled_gradients, stage):
        assert_bitwise(grads, expected, "gradients after unscale_")


def _torch_scaler(rank: int, world_size: int, stage: int) -> str:
    params = make_parameters(SHAPES, torch.float32)
    opt = zero_optim.ShardedAdamW(params, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(linear_loss(params, make_gradients(params, rank, 0))).backward()
    _, text = error_of(lambda: scaler.step(opt))
    opt.close()
    return text


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_torchs_own_scaler_names_ours_with_more_ranks(stage):
    for text in run_ranks(2, _torch_scaler, stage):
        assert "zero_optim.GradScaler" in text


def _without_data(rank: int, world_size: int, stage: int, missing: int, unscales: bool) -> tuple[list[Tensor], float]:
    """Rank 1 has no data in the step ``missing``, and makes the scaler's calls alone."""
    model = nn.Linear(8, 8)
    nn.init.eye_(model.weight)
    if stage == 3:
        zero_optim.shard_module(model)
    opt = zero_optim.ShardedAdamW(model.parameters(), lr=0.1, **({} if stage == 3 else {"stage": stage}))
    scaler = zero_optim.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        if (rank, step) != (1, missing):
            scaler.scale(model(torch.full((2, 8), 1.0 + rank + step)).square().mean()).backward()
        if unscales:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return [whole.clone() for _, whole in zero_optim.iter_full_parameters(model)], scaler.get_scale()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_without_data_makes_the_scalers_calls_from_the_first_step_on(stage, unscales):
    """AdamW's first update does not depend on the size of gradients: so the missing half shows from the second on."""
    for missing in (0, 1):
        first, second = run_ranks(2, _without_data, stage, missing, unscales)
        assert first[1] == second[1] == 2.0**10
        assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_a_gradient_that_was_not_scaled_is_told():
    parameter = nn.Parameter(torch.ones(4))
    opt, scaler = zero_optim.ShardedAdamW([parameter]), zero_optim.GradScaler("cpu")
    parameter.sum().backward()
    with pytest.raises(AssertionError, match="scaler.scale"):
        scaler.step(opt)
    opt.close()
