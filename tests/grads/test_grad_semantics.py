"""What ``.grad`` is when, on one rank and on several: readable, editable, guarded, dropped, zeroed, assigned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, averages
from torch import Tensor, nn
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    Planned,
    assert_bitwise,
    copies,
    linear_backward,
    linear_loss,
    make_gradients,
    make_parameters,
    named,
    raise_in_backward,
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


def _guarded(opt, params, rank, world_size):
    import zero_optim

    linear_backward(params, make_gradients(params, rank, 7))
    grad = params[0].grad
    assert grad.shape == params[0].shape
    assert grad.dtype == params[0].dtype
    assert grad.device == params[0].device
    uses: dict[str, Callable[[], Any]] = {
        "add": lambda: grad + 1,
        "sum": lambda: grad.sum(),
        "mul_": lambda: grad.mul_(2),
        "div_": lambda: torch._foreach_div_([grad], 2.0),
        "copy from": lambda: torch.empty_like(params[0]).detach().copy_(grad),
        "copy to": lambda: grad.copy_(torch.ones(params[0].shape)),
        "index": lambda: grad[0],
        "item": lambda: params[2].grad.item(),
        "norm": lambda: torch.linalg.vector_norm(grad),
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
        "clip_grad_value_": lambda: torch.nn.utils.clip_grad_value_(params, 1.0),
    }
    for use, action in uses.items():
        try:
            action()
        except zero_optim.ShardAccessError as error:
            remedy = "`.local`" if use == "index" else "clip_grad_norm_"
            assert remedy in str(error), f"{use}: the remedy is named: {error}"
            assert "layer" in str(error), f"{use}: the parameter is named: {error}"
        except Exception as error:
            raise AssertionError(f"{use} raised {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{use} on a sharded gradient did not raise")
    for use in (grad.numpy, grad.tolist, params[2].grad.__float__):  # torch itself refuses some of these
        with pytest.raises(RuntimeError):
            use()
    assert isinstance(repr(grad), str)
    opt.step()


def test_sharded_gradients_refuse_reading_and_editing_and_name_the_remedy():
    check(_guarded, lambda oracle, world_size: oracle.step(_average(world_size, 7)), stages=(1, 2), worlds=(2,))


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


def _drop_then_backward(opt, params, rank, world_size):
    for step in (7, 8, 9):
        linear_backward(params, make_gradients(params, rank, step))
        if step == 9:
            opt.step()
        for p in params:
            p.grad = None


def test_a_gradient_dropped_by_the_model_is_forgotten_before_the_next_backward():
    check(_drop_then_backward, lambda oracle, world_size: oracle.step(_average(world_size, 9)))


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


def _zero_grad_then_backward(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    opt.zero_grad()
    assert all(p.grad is None for p in params)
    opt.step()  # nothing to apply
    linear_backward(params, make_gradients(params, rank, 8))
    opt.step()


def test_zero_grad_drops_what_was_reduced():
    check(_zero_grad_then_backward, lambda oracle, world_size: oracle.step(_average(world_size, 8)))


def _zeros(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    opt.zero_grad(set_to_none=False)
    opt.step()
    linear_backward(params, make_gradients(params, rank, 8))
    opt.step()


def _apply_zeros_then_gradients(oracle, world_size):
    _apply_zeros(oracle, world_size)
    oracle.step(_average(world_size, 8))


def test_set_to_none_false_means_zero_gradients():
    check(_zeros, _apply_zeros_then_gradients)


def _step_twice(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    opt.step()
    opt.step()
    opt.zero_grad()
    linear_backward(params, make_gradients(params, rank, 8))
    opt.step()


def _apply_twice(oracle, world_size):
    oracle.step(_average(world_size, 7))
    oracle.step(_average(world_size, 7))
    oracle.step(_average(world_size, 8))


def test_a_second_step_applies_the_gradients_again():
    check(_step_twice, _apply_twice)


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


def _reduced_then_two_local(opt, params, rank, world_size):
    linear_backward(params, make_gradients(params, rank, 7))
    with opt.no_sync():
        linear_backward(params, make_gradients(params, rank, 8, 0))
        linear_backward(params, make_gradients(params, rank, 8, 1))
    opt.step()


def _apply_reduced_and_local(oracle, world_size):
    local = [
        accumulate(make_gradients(oracle.params, rank, 8, 0), make_gradients(oracle.params, rank, 8, 1))
        for rank in range(world_size)
    ]
    oracle.step(accumulate(_average(world_size, 7), averages(local)))


def test_local_gradients_add_to_a_reduced_one():
    check(_reduced_then_two_local, _apply_reduced_and_local, worlds=(2, 3), stages=(1, 2))
    check(_reduced_then_two_local, _apply_reduced_and_local, worlds=(2,), stages=(0,))


# -- assigned by hand, a backward that raised on one rank --------------------------------------------------------------


def _assigned(opt, params, rank, world_size):
    for p, g in zip(params, make_gradients(params, rank, 7), strict=True):
        p.grad = g
    opt.step()
    opt.zero_grad()
    assert all(p.grad is None for p in params)


def test_a_gradient_assigned_by_hand_is_a_local_gradient():
    check(_assigned, lambda oracle, world_size: oracle.step(_average(world_size, 7)))


def _assigned_on_one_rank(opt, params, rank, world_size):
    if rank == 0:
        params[6].grad = make_gradients(params, rank, 7)[6]
    opt.step()


def _apply_one_rank(oracle, world_size):
    grads = make_gradients(oracle.params, 0, 7)
    only = [g if i == 6 else None for i, g in enumerate(grads)]
    oracle.step(averages([only] + [[None] * len(only)] * (world_size - 1)))


def test_a_gradient_assigned_on_one_rank_alone():
    check(_assigned_on_one_rank, _apply_one_rank, worlds=(2,))
    check(_assigned_on_one_rank, _apply_one_rank, stages=(1, 2), worlds=(3,))


def _apply_after_raise(oracle, world_size):
    oracle.step(_average(world_size, 8))
    oracle.step(_average(world_size, 9))


def _raising_on_one_rank(opt, params, rank, world_size):
    grads = make_gradients(params, rank, 7)
    first = linear_loss(params[:4], grads[:4])
    if rank == 1:
        first = raise_in_backward(first)
    try:
        (first + linear_loss(params[4:], grads[4:])).backward()
    except Planned:
        assert rank == 1
    opt.zero_grad()  # the batch is given up on every rank
    linear_backward(params, make_gradients(params, rank, 8))
    opt.step()
    opt.zero_grad()
    linear_backward(params, make_gradients(params, rank, 9))
    opt.step()


@pytest.mark.parametrize("warm_up", [0, WARM_UP])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_that_raised_on_one_rank_does_not_desynchronise(stage, warm_up):
    oracle = _oracle(2, warm_up)
    _apply_after_raise(oracle, 2)
    for params in run_ranks(2, _run, stage, _raising_on_one_rank, warm_up, TINY_CAP_MB, {}):
        assert_bitwise(params, oracle.params, f"stage {stage}")
