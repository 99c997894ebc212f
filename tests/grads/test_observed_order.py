"""Buckets follow the order in which gradients became ready in the first backward."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from guards import CollectiveLog
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from training_cases import (
    ROW,
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
SHUFFLED = (3, 0, 6, 1, 7, 5, 2, 4)


def _shuffled(rank: int, world_size: int, stage: int, orders: tuple[tuple[int, ...], ...]) -> tuple[list[Tensor], bool]:
    """The order in which rank ``r`` uses the parameters is ``orders[(r + step) % len(orders)]``."""
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16)
    before = [(id(p), p.shape, p.dtype) for p in params]
    opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    for step in range(4):
        grads = make_gradients(params, rank, step)
        order = orders[(rank + step) % len(orders)]
        linear_backward([params[i] for i in order], [grads[i] for i in order])
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params), before == [(id(p), p.shape, p.dtype) for p in params]


@pytest.mark.parametrize(
    "orders", [(SHUFFLED,), (SHUFFLED, tuple(range(8))), (tuple(range(8)), SHUFFLED, (7, 6, 5, 4, 3, 2, 1, 0))]
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_any_order_on_any_rank_gives_the_same_parameters(stage, orders):
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), Hyper(lr=LR))
    for step in range(4):
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(2)]))
    for params, kept in run_ranks(2, _shuffled, stage, orders):
        assert kept, "parameters keep identity, shape and dtype when buckets are laid out again"
        assert_bitwise(params, oracle.params)


def _states_at_once(rank: int, world_size: int, stage: int) -> tuple[int, int]:
    """How many states of shards there are at once in the first step, at most; and how many buckets."""
    import zero_optim
    from zero_optim.stores.state_store import DeviceStore

    kept = []

    class Counting(DeviceStore):
        def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
            number = super().allocate(page, visiting)
            kept.append(len(self._pages))
            return number

    params = make_parameters(SHAPES, torch.bfloat16)
    with mock.patch("zero_optim.stores.paged_store.DeviceStore", Counting):
        opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    grads = make_gradients(params, rank, 0)
    linear_backward([params[i] for i in SHUFFLED], [grads[i] for i in SHUFFLED])
    opt.step()
    opt.close()
    return max(kept), len(opt.engine.reducer.buckets)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_is_not_kept_twice_while_buckets_are_laid_out_again(stage):
    for states, buckets in run_ranks(2, _states_at_once, stage):
        assert states <= buckets


def _first_reduced(rank: int, world_size: int, stage: int, order: tuple[int, ...]) -> list[int]:
    """Rows of each bucket in the order in which they were reduced, in a steady step."""
    import zero_optim

    shapes = [(12 * (i + 1), ROW) for i in range(len(order))]
    params = make_parameters(shapes, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    for step in range(2):
        grads = make_gradients(params, rank, step)
        with CollectiveLog() as log:
            linear_backward([params[i] for i in order], [grads[i] for i in order])
        opt.step()
        opt.zero_grad()
    opt.close()
    return [call.bytes // (2 * ROW * 12) - 1 for call in log.calls]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_leave_in_the_order_of_the_first_backward(stage):
    """What is used last in forward becomes ready first in backward."""
    order = (2, 0, 3, 1)
    assert run_ranks(2, _first_reduced, stage, order) == [list(reversed(order))] * 2


def _nested(rank: int, world_size: int, stage: int, segments: tuple[int, int]) -> tuple[list[int], list[Tensor]]:
    """Reductions of each step when rank ``r`` runs ``segments[r]`` reentrant checkpoints, each over its own layer."""
    import zero_optim

    params = make_parameters(((12, ROW),) * 4)
    opt = zero_optim.ShardedAdamW(params, lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    x = torch.ones(12, ROW, requires_grad=True)
    counts = []
    for _ in range(3):
        with CollectiveLog() as log:
            loss = (params[3] * 3).sum()
            for index in range(3):
                if index < segments[rank]:
                    loss = loss + checkpoint(lambda t, w=params[index]: t * w, x, use_reentrant=True).sum()
                else:
                    loss = loss + params[index].sum()
            loss.backward()
            opt.step()
        opt.zero_grad()
        counts.append(sum(call.name in ("allreduce_", "scatter_") for call in log.calls) - 1)
    opt.close()
    return counts, copies(params)


@pytest.mark.parametrize("segments", [(3, 3), (2, 1), (0, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_backwards_within_a_backward_are_one_round(stage, segments):
    oracle = MasterAdamW(make_parameters(((12, ROW),) * 4), Hyper(lr=LR))
    for _ in range(3):
        oracle.step([torch.ones(12, ROW)] * 3 + [torch.full((12, ROW), 3.0)])
    for counts, params in run_ranks(2, _nested, stage, segments, timeout=40):
        # Then they lay out buckets, buffers and state, and after each ask whether it has failed on any rank.
        assert counts == [5 + 3, 4, 4], "in the first step the ranks merge what they have seen"
        assert_bitwise(params, oracle.params)
