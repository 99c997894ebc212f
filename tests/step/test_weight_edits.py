"""Weights edited between steps: a 16-bit parameter's master follows an edit, and only an edited parameter's."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
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


def _edit(rank: int, world_size: int, stage: int, dtype: torch.dtype, edit: str, when: str) -> list[Tensor]:
    """Three steps; in the second, the weights are edited before or after backward."""
    import zero_optim

    params = make_parameters(SHAPES, dtype)
    opt = zero_optim.ShardedAdamW(params, lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
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


def _edit_cells(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    return {
        f"stage {stage}, {edit} {when}": _edit(rank, world_size, stage, dtype, edit, when)
        for stage in (0, 1, 2)
        for edit in EDITS
        for when in ("before backward", "before step")
    }


def _expected(world_size: int, dtype: torch.dtype) -> list[Tensor]:
    oracle = MasterAdamW(make_parameters(SHAPES, dtype), Hyper(lr=LR))
    for step in range(4):
        if step == 2:
            for i in EDITED:
                oracle.params[i] = _value(oracle.params[i])
                oracle.master[i] = oracle.params[i].float()
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
    return oracle.params


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_edits_through_the_parameter_hold(dtype, world_size):
    expected = _expected(world_size, dtype)
    for results in run_ranks(world_size, _edit_cells, dtype):
        for cell, params in results.items():
            assert_bitwise(params, expected, cell)


def _edit_data(rank: int, world_size: int, stage: int) -> list[Tensor]:
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
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
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), Hyper(lr=LR))
    for step in range(3):
        if step == 2:
            oracle.params = [_value(p) for p in oracle.params]
            oracle.master = [p.float() for p in oracle.params]
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
    for stage in (0, 1, 2):
        for params in run_ranks(world_size, _edit_data, stage):
            assert_bitwise(params, oracle.params, f"stage {stage}")


def _edit_in_a_skipped_step(rank: int, world_size: int, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """An edit outlives a step that was skipped, and a parameter without a gradient keeps it too."""
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    for step in range(4):
        grads: list[Tensor | None] = list(make_gradients(params, rank, step))
        if step == 1:
            _copy(params)
            grads[1].view(-1)[0] = float("inf")
        elif step == 2:
            grads[6] = None
        linear_backward(params, grads)
        opt.step()
        opt.zero_grad()
        if step == 1:
            after_skip = copies(params)
    opt.close()
    return after_skip, copies(params)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_edit_outlives_a_skipped_step_and_a_missing_gradient(stage):
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), Hyper(lr=LR))
    for step in range(4):
        grads = averages([make_gradients(oracle.params, rank, step) for rank in range(2)])
        if step == 1:
            for i in EDITED:
                oracle.params[i] = _value(oracle.params[i])
                oracle.master[i] = oracle.params[i].float()
            edited = copies(oracle.params)
            continue
        oracle.step([None if step == 2 and i == 6 else g for i, g in enumerate(grads)])
    for after_skip, params in run_ranks(2, _edit_in_a_skipped_step, stage):
        assert_bitwise(after_skip, edited, "after the skipped step")
        assert_bitwise(params, oracle.params, "at the end")


# -- edits that no version counter shows -------------------------------------------------------------------------------


def _edit_unseen(rank: int, world_size: int, stage: int, offload: str | None) -> tuple[list[list[Tensor]], list[str]]:
    """Parameters that are clamped through ``data`` before some steps: hidden, then said. And what is warned of."""
    import zero_optim

    trained = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for said in (False, True):
            params = make_parameters(SHAPES, torch.bfloat16)
            options = {"stage": stage, "bucket_cap_mb": TINY_CAP_MB, "state_offload": offload}
            opt = zero_optim.ShardedAdamW(named(params), lr=LR, **options)
            for step in range(6):
                for p in params if step in (3, 5) else ():
                    p.data.clamp_(-0.5, 0.5)
                if said and step in (3, 5):
                    opt.refresh_master()
                linear_backward(params, make_gradients(params, rank, step))
                opt.step()
                opt.zero_grad()
            opt.close()
            trained.append(copies(params))
    return trained, [text for warning in caught if "version counter" in (text := str(warning.message))]


@pytest.mark.parametrize(
    ("stage", "world_size", "offload"), [(2, 1, None), (0, 2, None), (1, 2, None), (2, 2, None), (2, 1, "paged")]
)
def test_edits_through_data_are_taken_over_with_one_warning(stage: int, world_size: int, offload: str | None) -> None:
    for (hidden, said), warned in run_ranks(world_size, _edit_unseen, stage, offload):
        assert_bitwise(hidden, said)
        assert len(warned) == 1 and "'layer" in warned[0] and "opt.refresh_master()" in warned[0]
