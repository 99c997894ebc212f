"""What ``.grad`` is when, on one rank and on several: readable, editable, guarded, dropped, zeroed, assigned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, averages
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
WARM_UP = 2  # steps before the one that is looked at: the buckets have taken their observed order by then
Scenario = Callable[[Any, list[nn.Parameter], int, int], None]


def _run(
    rank: int, world_size: int, stage: int, scenario: Scenario, warm_up: int, cap: float, options: dict[str, Any]
) -> list[Tensor]:
    """Parameters after ``warm_up`` plain steps and ``scenario``, which makes its own steps."""
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=cap, **options)
    for step in range(warm_up):
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    scenario(opt, params, rank, world_size)
    opt.close()
    return copies(params)


def _oracle(world_size: int, warm_up: int) -> MasterAdamW:
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), Hyper(lr=LR))
    for step in range(warm_up):
        oracle.step(_average(world_size, step))
    return oracle


def _average(world_size: int, step: int, micro: int = 0) -> list[Tensor | None]:
    like = make_parameters(SHAPES, torch.bfloat16)
    return averages([make_gradients(like, rank, step, micro) for rank in range(world_size)])


def _run_cells(
    rank: int, world_size: int, cells: list[tuple[int, int, float]], scenario: Scenario, options: dict[str, Any]
):
    return [_run(rank, world_size, stage, scenario, warm_up, cap, options) for stage, warm_up, cap in cells]


def check(
    scenario: Scenario, expected: Callable[[MasterAdamW, int], None], stages=(0, 1, 2), worlds=(1, 2), **options
) -> None:
    """Runs the scenario and lets ``expected`` play it on the oracle, at the first step and at a later one.

    Buckets hold one parameter each, or several. Stages, steps and buckets meet in pairs: one number of ranks has the
    cells that the next one leaves out.
    """
    every = list(itertools.product(stages, enumerate((0, WARM_UP)), enumerate((TINY_CAP_MB, 25.0))))
    for world_size in worlds:
        cells = [
            (stage, warm_up, cap)
            for stage, (later, warm_up), (large, cap) in every
            if (stage + later + large + world_size) % 2 == 0
        ]
        oracles = {warm_up: _oracle(world_size, warm_up) for warm_up in (0, WARM_UP)}
        for oracle in oracles.values():
            expected(oracle, world_size)
        for results in run_ranks(world_size, _run_cells, cells, scenario, options):
            for (stage, warm_up, cap), params in zip(cells, results, strict=True):
                what = f"stage {stage}, {world_size} ranks, cap {cap}, after {warm_up} steps"
                assert_bitwise(params, oracles[warm_up].params, what)


# -- readable and editable where one rank holds it --------------------------------------------------------------------


def _read_and_halve(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    assert_bitwise([p.grad for p in params], _average(world_size, 7), "gradients after backward")
    for p in params:
        p.grad.mul_(0.5)
    opt.step()


def _apply_halved(oracle, world_size):
    oracle.step([g * 0.5 for g in _average(world_size, 7)])


def test_gradients_are_read_and_edited_on_one_rank_at_every_stage():
    check(_read_and_halve, _apply_halved, worlds=(1,))


def test_the_average_is_read_and_edited_at_stage_0():
    check(_read_and_halve, _apply_halved, stages=(0,), worlds=(2,))


def _edit_local(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    assert_bitwise([p.grad for p in params], make_gradients(params, rank, 7), "local gradients")
    for p in params:
        p.grad.mul_(rank + 2)
    opt.step()


def _apply_edited_local(oracle, world_size):
    local = [make_gradients(oracle.params, rank, 7) for rank in range(world_size)]
    oracle.step(averages([[g * (rank + 2) for g in grads] for rank, grads in enumerate(local)]))


def test_stage_1_without_overlap_keeps_the_local_gradient_until_step():
    check(_edit_local, _apply_edited_local, stages=(1,), worlds=(2,), overlap_grad_reduce=False)


# -- guarded where it is sharded ------------------------------------------------------------------------------------


def _zeroed_in_place(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    for p in params:
        p.grad.detach()
        p.grad.zero_()
    opt.step()


def _apply_zeros(oracle, world_size):
    oracle.step([torch.zeros_like(p) for p in oracle.params])


def test_zero_and_detach_pass_and_zero_means_zero():
    check(_zeroed_in_place, _apply_zeros)


# -- dropped, zeroed, applied again -----------------------------------------------------------------------------------


def _drop_some(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    params[1].grad = params[6].grad = None
    linear_backward(params, make_gradients(params, rank, 8))
    opt.step()


def _apply_some(oracle, world_size):
    first, second = _average(world_size, 7), _average(world_size, 8)
    first[1] = first[6] = None
    oracle.step(accumulate(first, second))


def test_dropping_some_gradients_keeps_the_others():
    check(_drop_some, _apply_some)


def _assign_after_clip(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    opt.clip_grad_norm_(1e9)
    params[6].grad = make_gradients(params, rank, 8)[6]
    opt.step()


def _apply_replaced(oracle, world_size):
    other = _average(world_size, 8)[6]
    oracle.step([other if i == 6 else g for i, g in enumerate(_average(world_size, 7))])


def test_a_gradient_replaced_after_clipping_is_applied_on_one_rank():
    check(_assign_after_clip, _apply_replaced, worlds=(1,))
