"""Errors that one rank has a part in: on CUDA every rank raises them one step later, in the same call, and goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from cells import pairs
from harness import run_ranks
from oracle import Hyper, MasterAdamW
from simulated_gpu.switch import LATE, the_device
from torch import Tensor, nn
from training_cases import assert_bitwise, copies, linear_backward, make_gradients, make_parameters

SHAPES = ((17, 9), (40, 3), (5,))
STEPS, WRONG = 7, 3  # the second one learns in which order gradients come
ON_CUDA, ON_CPU = LATE, ""


def _twice(params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    """A second backward within the first, after the bucket of the last parameter has left."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                (params[-1] * grads[-1]).sum().backward()
            return grad

    total = sum((Again.apply(p) * g).sum() for p, g in zip(params, grads, strict=True))
    assert isinstance(total, Tensor)
    total.backward()


def _thawed(params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    frozen = params[0]
    frozen.requires_grad_(True)
    linear_backward(params, grads)


def _assigned(params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    linear_backward(params, grads)
    params[-1].grad = torch.ones_like(params[-1])


FAULTS: dict[str, tuple[Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None], str]] = {
    "late": (_twice, "GradientError"),
    "thawed": (_thawed, "RankMismatchError"),
    "leftover": (_assigned, "GradientError"),
}


def _gradients(rank: int, step: int) -> list[Tensor]:
    return list(make_gradients(make_parameters(SHAPES, torch.float32), rank, step, grid=2))


def _train(
    rank: int, world_size: int, fault: str, stage: int, how: str = ""
) -> tuple[list[tuple[int, str]], list[Tensor]]:
    """The steps that raised, and what; the parameters at the end. Rank 1 does something wrong in one step. ``how``:
    words, what is called before ``step``."""
    device = the_device()
    params = [nn.Parameter(p.detach().to(device)) for p in make_parameters(SHAPES, torch.float32)]
    params[0].requires_grad_(fault != "thawed")
    opt = zero_optim.ShardedAdamW(params, lr=1e-2, stage=stage, bucket_cap_mb=1e-5)
    scaler = zero_optim.GradScaler(init_scale=1.0, enabled="unscale_" in how)
    scaler.scale(torch.ones(1, device=device))
    raised = []
    for step in range(STEPS):
        grads = [grad.to(device) for grad in _gradients(rank, step)]
        trained = range(len(params))[fault == "thawed" :]
        try:
            if rank == 1 and step == WRONG:
                FAULTS[fault][0](params, grads)
            else:
                linear_backward([params[i] for i in trained], [grads[i] for i in trained])
            if "unscale_" in how:
                scaler.unscale_(opt)
            if "clip" in how:
                opt.clip_grad_norm_(1e9)
            scaler.step(opt)
        except zero_optim.ZeroOptimError as error:
            raised.append((step, type(error).__name__))
        finally:
            params[0].requires_grad_(fault != "thawed")
            if scaler.is_enabled():
                scaler.update(1.0)
            opt.zero_grad()
    result = [p.cpu() for p in copies(params)]
    opt.close()
    return raised, result


@pytest.mark.parametrize(("fault", "stage", "simulated"), pairs([*FAULTS], [0, 1, 2], [ON_CUDA, ON_CPU]))
def test_ranks_raise_in_the_same_step_and_train_on(fault: str, stage: int, simulated: str) -> None:
    told = WRONG + (simulated == ON_CUDA)
    oracle = MasterAdamW(make_parameters(SHAPES, torch.float32), Hyper(lr=1e-2))
    for step in range(STEPS):
        if step not in (WRONG, told):
            mean = [(a + b) / 2 for a, b in zip(_gradients(0, step), _gradients(1, step), strict=True)]
            oracle.step([None, *mean[1:]] if fault == "thawed" else mean)
    for raised, params in run_ranks(2, _train, fault, stage, simulated=simulated):
        assert raised == [(told, FAULTS[fault][1])]
        assert_bitwise(params, oracle.params, fault)


@pytest.mark.parametrize(
    ("fault", "stage", "how"), pairs(["late", "leftover"], [0, 2], ["clip", "unscale_", "unscale_ and clip"])
)
def test_they_do_whatever_comes_before_step(fault: str, stage: int, how: str) -> None:
    for raised, _ in run_ranks(2, _train, fault, stage, how, simulated=ON_CUDA):
        assert [step for step, _ in raised] == [WRONG + 1]


def _closes_early(rank: int, world_size: int) -> list[str]:
    """What the close after a step in which rank 1 has assigned a gradient warns of."""
    params = [nn.Parameter(p.detach().to("cuda")) for p in make_parameters(SHAPES, torch.float32)]
    opt = zero_optim.ShardedAdamW(params, lr=1e-2)
    for step in range(2):
        linear_backward(params, [grad.to("cuda") for grad in _gradients(rank, step)])
        if (rank, step) == (1, 1):
            params[-1].grad = torch.ones_like(params[-1])
        opt.step()
        if step == 0:
            opt.zero_grad()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt.close()
    return [str(warning.message) for warning in told]


def test_an_error_of_the_last_step_is_told_by_close() -> None:
    for told in run_ranks(2, _closes_early, simulated=ON_CUDA):
        assert [text for text in told if "the last step was skipped: a gradient of" in text]


def _in_a_pipeline(
    rank: int, world_size: int, fault: str, options: dict[str, Any]
) -> tuple[list[bool], list[tuple[int, str]]]:
    """By step, whether the parameters moved; the steps that raised, and what. Ranks 0 and 1 have one stage, 2 and 3 the
    other; rank 1 is wrong."""
    shares = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    device = the_device()
    params = [nn.Parameter(p.detach().to(device)) for p in make_parameters(SHAPES, torch.float32)]
    groups = {"process_group": shares, "pipeline": stages}
    opt = zero_optim.ShardedAdamW(params, lr=1e-2, stage=1, bucket_cap_mb=1e-5, **groups, **options)
    moved, raised = [], []
    for step in range(STEPS):
        before = [p.cpu() for p in copies(params)]
        grads = [grad.to(device) for grad in _gradients(rank % 2, step)]
        try:
            FAULTS[fault][0](params, grads) if (rank, step) == (1, WRONG) else linear_backward(params, grads)
            opt.step()
        except zero_optim.ZeroOptimError as error:
            raised.append((step, type(error).__name__))
        opt.zero_grad()
        moved.append(not all(map(torch.equal, before, [p.cpu() for p in copies(params)])))
    opt.close()
    return moved, raised


@pytest.mark.parametrize("simulated", [ON_CUDA, ON_CPU])
@pytest.mark.parametrize(
    "options", [{}, {"skip_nonfinite": False}, {"skip_nonfinite": False, "max_grad_norm": 1.0}], ids=str
)
def test_all_stages_of_a_pipeline_skip_the_step_that_one_skips_and_raise(
    options: dict[str, Any], simulated: str
) -> None:
    late = WRONG + (simulated == ON_CUDA)
    for rank, (moved, raised) in enumerate(run_ranks(4, _in_a_pipeline, "late", options, simulated=simulated)):
        assert moved == [step not in {WRONG, late} for step in range(STEPS)]
        assert raised == [(late, "GradientError" if rank < 2 else "RankMismatchError")]
