"""What users do with autograd around the optimizer: own hooks, ``autograd.grad``, double backward, odd strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, averages
from torch import Tensor, nn
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    linear_backward,
    linear_loss,
    make_gradients,
    make_parameters,
    named,
)

SHAPES = ((17, 9), (300,), (12, 8), (40, 25))
LR = 1e-2
WARM_UP = 2
Scenario = Callable[[Any, list[nn.Parameter], int], None]


def _run(rank: int, world_size: int, scenario: Scenario) -> dict[int, list[Tensor]]:
    """Parameters by stage after two plain steps, the scenario, and a step."""
    import zero_optim

    results = {}
    for stage in (0, 1, 2):
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
        for step in range(WARM_UP):
            linear_backward(params, make_gradients(params, rank, step))
            opt.step()
            opt.zero_grad()
        scenario(opt, params, rank)
        opt.step()
        opt.close()
        results[stage] = copies(params)
    return results


def _oracle(world_size: int) -> MasterAdamW:
    oracle = MasterAdamW(make_parameters(SHAPES), Hyper(lr=LR))
    for step in range(WARM_UP):
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
    return oracle


def check(scenario: Scenario, grads: Callable[[list[Tensor], int], list[Tensor | None]]) -> None:
    """``grads(parameters, rank)`` are the local gradients that the step after the scenario must apply."""
    for world_size in (1, 2):
        oracle = _oracle(world_size)
        oracle.step(averages([grads(oracle.params, rank) for rank in range(world_size)]))
        for results in run_ranks(world_size, _run, scenario):
            for stage, params in results.items():
                assert_bitwise(params, oracle.params, f"stage {stage}, {world_size} ranks")


def _within_no_sync(opt, params, rank):
    """Nested no_sync, one of them left by an exception."""
    with opt.no_sync():
        try:
            with opt.no_sync():
                raise KeyError
        except KeyError:
            pass
        linear_backward(params, make_gradients(params, rank, 8))
    linear_backward(params, make_gradients(params, rank, 7))


def test_no_sync_nests_and_survives_exceptions():
    check(
        _within_no_sync,
        lambda params, rank: accumulate(make_gradients(params, rank, 8), make_gradients(params, rank, 7)),
    )


def _inputs(opt, params, rank):
    linear_loss(params, make_gradients(params, rank, 7)).backward(inputs=[params[0], params[3]])


def test_backward_into_some_inputs():
    check(
        _inputs,
        lambda params, rank: [g if i in (0, 3) else None for i, g in enumerate(make_gradients(params, rank, 7))],
    )


def _odd_strides(opt, params, rank):
    """Gradients by hand: transposed, every other element, one value expanded."""
    full = make_gradients(params, rank, 7)
    params[0].grad = full[0].t().contiguous().t()
    params[1].grad = torch.stack([full[1], full[1]], 1)[:, 0]
    params[2].grad = full[2][:1, :1].expand(12, 8)


def test_assigned_gradients_of_any_stride():
    def expected(params, rank):
        full = make_gradients(params, rank, 7)
        return [full[0], full[1], full[2][:1, :1].expand(12, 8).clone(), None]

    check(_odd_strides, expected)


def _narrow(rank: int, world_size: int, stage: int) -> list[Tensor]:
    import zero_optim

    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(
        params, lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB, grad_reduce_dtype=torch.bfloat16
    )
    for step in range(3):
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params)


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_gradients_reduced_in_bf16(stage):
    oracle = MasterAdamW(make_parameters(SHAPES), Hyper(lr=LR))
    for step in range(3):
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(3)], torch.bfloat16))
    for params in run_ranks(3, _narrow, stage):
        assert_bitwise(params, oracle.params)
