"""Several optimizers in one process: hooks in the same backward, other parts of each model on each rank, one owner."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor, nn
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    error_of,
    linear_backward,
    make_gradients,
    make_parameters,
    named,
)
from zero_optim.comm.handle import CommBuffers

SHAPES = ((17, 9), (300,), (1,), (12, 8), (5, 3), (40, 25), (2, 1), (130,), (64,))
OWNERS = (0, 1, 2, 0, 1, 2, 0, 1, 2)  # which optimizer has each parameter: they alternate in every backward
DTYPES = (torch.float32, torch.bfloat16, torch.float32)  # by optimizer
RATES = (1e-2, 3e-3, 2e-2)


def _parameters() -> list[nn.Parameter]:
    return [
        make_parameters([shape], DTYPES[of], seed=i)[0]
        for i, (shape, of) in enumerate(zip(SHAPES, OWNERS, strict=True))
    ]


def _optimizers(
    params: list[nn.Parameter], stages: tuple[int, ...], group: dist.ProcessGroup | None = None
) -> list[Any]:
    return [
        zero_optim.ShardedAdamW(
            [p for p, of in zip(named(params), OWNERS, strict=True) if of == number],
            lr=RATES[number],
            stage=stage,
            process_group=group,
            bucket_cap_mb=TINY_CAP_MB,
            overlap_grad_reduce=number != 1 or stage != 1,
        )
        for number, stage in enumerate(stages)
    ]


# -- one owner a parameter -------------------------------------------------------------------------------------------


def _shared(rank: int, world_size: int, release: str) -> tuple[list[tuple[str, str]], list[Tensor]]:
    """Errors of the second owners of a parameter; and the weights, trained by the first, then by another."""
    params = make_parameters(SHAPES)
    first = zero_optim.ShardedAdamW(named(params[:4], "first"), lr=1e-2)
    linear_backward(params[:4], make_gradients(params[:4], rank, 0))

    extra = make_parameters(((3,),))
    other = zero_optim.ShardedAdamW(named(extra, "extra"), lr=1e-2)
    texts = [
        error_of(lambda: zero_optim.ShardedAdamW(named(params[3:], "second"))),
        error_of(lambda: other.add_param_group({"params": named(params[2:3], "added")})),
        error_of(lambda: zero_optim.ShardedAdamW([("frozen", params[1].requires_grad_(False))])),
    ]
    params[1].requires_grad_(True)

    # What was refused has claimed nothing: neither the parameters that were free nor those of the first.
    free = zero_optim.ShardedAdamW(params[4:])
    free.close()
    other.close()

    first.step()
    if release == "close":
        first.close()
    del first
    gc.collect()
    for p in params:
        p.grad = None
    again = zero_optim.ShardedAdamW(params, lr=1e-2)
    linear_backward(params, make_gradients(params, rank, 1))
    again.step()
    again.close()
    return texts, copies(params)


@pytest.mark.parametrize("release", ["close", "delete"])
def test_a_parameter_has_one_live_optimizer(release):
    oracle = MasterAdamW(make_parameters(SHAPES), Hyper(lr=1e-2))
    before = copies(oracle.params)
    oracle.step([*averages([make_gradients(before[:4], rank, 0) for rank in range(2)]), *[None] * len(SHAPES[4:])])
    fresh = MasterAdamW(oracle.params, Hyper(lr=1e-2))
    fresh.step(averages([make_gradients(before, rank, 1) for rank in range(2)]))
    for texts, params in run_ranks(2, _shared, release, timeout=40):
        for (kind, text), name in zip(texts, ("second0.weight", "added0.weight", "frozen"), strict=True):
            assert kind == "ParameterError" and name in text, f"the parameter is named: {text or 'nothing raised'}"
            assert "close()" in text, f"the remedy is named: {text}"
        assert_bitwise(params, fresh.params)


def _shared_on_one_rank(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 alone gives a parameter twice: all ranks learn of it."""
    params = make_parameters(((4, 3), (5,)))
    kept = zero_optim.ShardedAdamW(named(params, "kept"))
    again = params if rank == 1 else make_parameters(((4, 3), (5,)))
    found = error_of(lambda: zero_optim.ShardedAdamW(named(again, "again")))
    kept.close()
    return found


def test_a_second_owner_on_one_rank_fails_all():
    (zero, zero_text), (one, one_text) = run_ranks(2, _shared_on_one_rank)
    assert (zero, one) == ("RankMismatchError", "ParameterError")
    assert "rank 1" in zero_text and "again0.weight" in zero_text
    assert "again0.weight" in one_text


def _closed_in_mid_round(rank: int, world_size: int) -> list[Tensor]:
    """Rank 1 finds its buffers taken when the last backward ends, rank 0 free ones. Both go on on the same ranks."""
    group, idle = dist.new_group(timeout=timedelta(seconds=5)), CommBuffers.idle
    params = _parameters()
    stages = (2, 2, 2)
    opts = _optimizers(params, stages, group)
    for step in range(2):
        if step == 1 and rank == 1:
            CommBuffers.idle = property(lambda buffers: False)  # type: ignore[assignment]
        linear_backward(params, make_gradients(params, rank, step))
        for opt in opts if step == 0 else ():
            opt.step()
            opt.zero_grad()
    CommBuffers.idle = idle  # type: ignore[assignment]
    for opt in opts:
        opt.close()
    again = zero_optim.ShardedAdamW(params[:1], process_group=group)
    linear_backward(params[:1], make_gradients(params[:1], rank, 2))
    again.step()
    again.close()
    return copies(params)


def test_closing_completes_what_ranks_have_begun_to_reduce():
    zero, one = run_ranks(2, _closed_in_mid_round)
    assert_bitwise(zero, one)
