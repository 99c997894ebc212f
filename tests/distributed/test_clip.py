"""The global norm of the averaged gradients, and clipping by it, as ``torch.nn.utils.clip_grad_norm_`` gives them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from harness import run_ranks
from oracle import FP32_EPS, averages
from torch import Tensor
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    assert_within,
    copies,
    linear_backward,
    make_gradients,
    make_parameters,
    named,
)

NORMS = (2.0, 1.0, math.inf)
ADAM = {"lr": 1e-2, "eps": 1e-1}  # a large eps lets the update feel the coefficient
STEPS = 3
LOOSE = 1e4  # in the second step the limit is far above the norm: nothing is clipped, and nothing scaled up
FILLED = tuple(shape for shape in SHAPES if 0 not in shape)  # torch's norm of nothing is an error for inf


def _norms(rank: int, world_size: int, stage: int, dtype: torch.dtype) -> list[Tensor]:
    """The three norms, one after another, of the same gradients."""
    import zero_optim

    params = make_parameters(SHAPES, dtype)
    opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    linear_backward(params, make_gradients(params, rank, 0))
    norms = [opt.clip_grad_norm_(math.inf, norm_type) for norm_type in NORMS]
    opt.close()
    return [norm.detach().clone() for norm in norms]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_norms_of_the_averaged_gradients(stage, world_size, dtype):
    like = make_parameters(SHAPES, dtype)
    average = torch.cat(
        [g.flatten() for g in averages([make_gradients(like, r, 0) for r in range(world_size)])]
    ).double()
    expected = [float(average.norm(p)) for p in NORMS]
    # Stage 0 on four ranks rounds sums in an order of gloo's own: a last-bit difference in some elements.
    relative = 2**-9 if stage == 0 and world_size > 2 and dtype == torch.bfloat16 else 16 * FP32_EPS
    results = run_ranks(world_size, _norms, stage, dtype)
    for norms in results:
        assert_bitwise(norms, results[0], "norms, on this rank and on rank 0")
        assert all(norm.shape == () for norm in norms)
        assert [float(norm) for norm in norms] == pytest.approx(expected, rel=relative)


def _clipped(rank: int, world_size: int, stage: int, norm_type: float) -> tuple[list[Tensor], list[float]]:
    import zero_optim

    params = make_parameters(FILLED)
    max_norm = {2.0: 3.0, 1.0: 100.0, math.inf: 0.5}[norm_type]
    opt = zero_optim.ShardedAdamW(params, **ADAM, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    norms = []
    for step in range(STEPS):
        linear_backward(params, make_gradients(params, rank, step))
        norms.append(opt.clip_grad_norm_(max_norm * LOOSE ** (step == 1), norm_type))
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params), [float(norm) for norm in norms]


def _torch_clipped(world_size: int, norm_type: float) -> tuple[list[Tensor], list[float]]:
    params = make_parameters(FILLED)
    adamw = torch.optim.AdamW(params, **ADAM)
    norms = []
    for step in range(STEPS):
        grads = averages([make_gradients(params, rank, step) for rank in range(world_size)])
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        max_norm = {2.0: 3.0, 1.0: 100.0, math.inf: 0.5}[norm_type]
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, max_norm * LOOSE ** (step == 1), norm_type)))
        adamw.step()
    return copies(params), norms


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("norm_type", NORMS)
def test_a_clipped_run_equals_torchs(norm_type, world_size):
    params, norms = _torch_clipped(world_size, norm_type)
    bounds = [FP32_EPS * STEPS * (4 * p.abs() + 64 * ADAM["lr"]) for p in params]
    for stage in (0, 1, 2):
        for own, own_norms in run_ranks(world_size, _clipped, stage, norm_type):
            assert own_norms == pytest.approx(norms, rel=16 * FP32_EPS)
            assert_within(own, params, bounds, f"stage {stage}")


def _called_and_given(rank: int, world_size: int, stage: int) -> list[list[Tensor]]:
    """Parameters of a run that clips by calls and of one that clips by ``max_grad_norm``; some steps are below it."""
    import zero_optim

    results = []
    for given in (None, 22.2):
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(params, **ADAM, stage=stage, bucket_cap_mb=TINY_CAP_MB, max_grad_norm=given)
        for step in range(4):
            linear_backward(params, [g * (step + 1) / 3 for g in make_gradients(params, rank, step)])
            if given is None:
                opt.clip_grad_norm_(22.2)
            opt.step()
            opt.zero_grad()
        opt.close()
        results.append(copies(params))
    return results


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_max_grad_norm_is_the_same_as_clipping_each_step(stage):
    for called, given in run_ranks(2, _called_and_given, stage):
        assert_bitwise(given, called)


def _explicit_beside_argument(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """A call of clip_grad_norm_ stands in for max_grad_norm in its step: here it clips nothing."""
    import zero_optim

    results = []
    for max_grad_norm in (0.1, None):
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(params, **ADAM, max_grad_norm=max_grad_norm)
        linear_backward(params, make_gradients(params, rank, 0))
        opt.clip_grad_norm_(math.inf)
        opt.step()
        opt.close()
        results.append(copies(params))
    return results[0], results[1]


def test_a_call_stands_in_for_max_grad_norm():
    for with_argument, without in run_ranks(2, _explicit_beside_argument):
        assert_bitwise(with_argument, without)


def _backward_after_clip(rank: int, world_size: int, stage: int) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Two micro-batches with a clip between them, and the same two without: the coefficient must be dropped."""
    import zero_optim

    results, messages = [], []
    for clip in (True, False):
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(params, **ADAM, stage=stage)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            linear_backward(params, make_gradients(params, rank, 0, 0))
            if clip:
                opt.clip_grad_norm_(0.1)
            linear_backward(params, make_gradients(params, rank, 0, 1))
            opt.step()
        messages += [str(w.message) for w in caught]
        opt.close()
        results.append(copies(params))
    return results[0], results[1], messages


@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_after_clipping_discards_the_coefficient_with_a_warning(stage):
    for clipped, plain, messages in run_ranks(2, _backward_after_clip, stage):
        assert_bitwise(clipped, plain)
        assert len(messages) == 1
        assert "clip_grad_norm_" in messages[0]


def _with_missing_gradients(rank: int, world_size: int, stage: int) -> float:
    import zero_optim

    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(params, stage=stage)
    for step in range(2):
        grads = make_gradients(params, rank, step)
        opt.zero_grad()
        linear_backward(params, [g if i % 2 == 0 or (step == 0) else None for i, g in enumerate(grads)])
        norm = opt.clip_grad_norm_(math.inf)
        opt.step()
    opt.close()
    return float(norm)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_absent_gradient_adds_nothing_to_the_norm(stage):
    """Buckets are reused: what they held a step ago must not be counted."""
    like = make_parameters(SHAPES)
    grads = averages([make_gradients(like, rank, 1) for rank in range(2)])
    present = torch.cat([g.flatten() for g in grads[::2]]).double()
    for norm in run_ranks(2, _with_missing_gradients, stage):
        assert norm == pytest.approx(float(present.norm()), rel=16 * FP32_EPS)


def _edited_after_a_clip(rank: int, world_size: int, stage: int, edit: str, editing: int) -> list[str]:
    """What each of three steps raises. Between clip and step of the second, the first ``editing`` ranks edit."""
    import zero_optim

    params = [torch.nn.Parameter(torch.ones(600)) for _ in range(3)]
    opt = zero_optim.ShardedAdamW(named(params), lr=0.1, stage=stage, bucket_cap_mb=0.002)
    raised = []
    for step in range(3):
        torch.stack([(p * (rank + 1)).sum() for p in params]).sum().backward()
        try:
            opt.clip_grad_norm_(1.0)
            if step == 1 and rank < editing:
                if edit == "drop":
                    params[1].grad = None
                else:
                    params[1].grad.zero_()
            opt.step()
            raised.append("")
        except zero_optim.RankMismatchError as error:
            raised.append(str(error))
        opt.zero_grad()
    opt.close()
    return raised


@pytest.mark.parametrize("edit", ["drop", "write"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_after_a_clip_on_one_rank_are_told_in_the_next_step(stage: int, edit: str) -> None:
    """To all ranks; and nobody waits for anybody before."""
    for *before, last in run_ranks(2, _edited_after_a_clip, stage, edit, 1):
        assert before == ["", ""]
        assert "'layer1.weight'" in last and "were dropped or written in place on some ranks" in last, last
    assert run_ranks(2, _edited_after_a_clip, stage, edit, 2) == [["", "", ""]] * 2
