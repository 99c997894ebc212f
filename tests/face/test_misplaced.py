"""An optimizer where it cannot work: in DDP, made before the process group, copied."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from torch import nn


def _backward_in_ddp(rank: int, world_size: int, stage: int, order: str) -> str:
    model = nn.Linear(8, 8)
    wrapper = nn.parallel.DistributedDataParallel(model) if order == "ddp_first" else None
    optimizer = zero_optim.ShardedAdamW(model.named_parameters(), stage=stage)
    if order == "optimizer_moved_ddp":  # accelerate's way: "cpu:0" is another device than "cpu" to .to()
        model.to("cpu:0")
    wrapper = wrapper or nn.parallel.DistributedDataParallel(model)
    with pytest.raises(zero_optim.ParameterError) as error:
        wrapper(torch.ones(1, 8)).sum().backward()
    optimizer.close()
    return str(error.value)


@pytest.mark.parametrize("order", ["ddp_first", "optimizer_first", "optimizer_moved_ddp"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_in_ddp_is_refused_in_the_first_backward(stage: int, order: str) -> None:
    for message in run_ranks(2, _backward_in_ddp, stage, order):
        assert message.startswith("'weight' is in a DistributedDataParallel module")
        assert "ShardedTrainer" in message


def _dropped_ddp(rank: int, world_size: int) -> None:
    model = nn.Linear(8, 8)
    wrapper = nn.parallel.DistributedDataParallel(model)
    wrapper.itself = wrapper  # lives until the collector runs
    del wrapper
    optimizer = zero_optim.ShardedAdamW(model.named_parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.close()


def test_a_ddp_module_that_was_dropped_does_no_harm() -> None:
    run_ranks(2, _dropped_ddp)


def _made_too_early(rank: int, world_size: int) -> str:
    model = nn.Linear(8, 8)
    with mock.patch.object(dist, "is_initialized", lambda: False):
        optimizer = zero_optim.ShardedAdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    with pytest.raises(zero_optim.RankMismatchError) as error:
        optimizer.step()
    return str(error.value)


def test_a_process_group_that_came_after_the_optimizer() -> None:
    for message in run_ranks(2, _made_too_early):
        assert "initialised after this optimizer was made" in message


def test_copies_are_refused() -> None:
    optimizer = zero_optim.ShardedAdamW(nn.Linear(2, 2).parameters())
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(zero_optim.ZeroOptimError, match="state_dict"):
            duplicate(optimizer)


def _moved_shards(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = nn.Linear(8, 8)
    optimizer = zero_optim.ShardedAdamW(model.named_parameters(), grad_reduce_dtype=torch.float32)
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    gradient = model.weight.grad
    moved = gradient.to("cpu:0", torch.bfloat16)
    optimizer.close()
    assert (moved.shape, moved.dtype, moved.start) == (gradient.shape, torch.bfloat16, gradient.start)
    return moved.local, gradient.local


def test_a_shard_moves_as_a_shard() -> None:
    parts = run_ranks(2, _moved_shards)
    for moved, original in parts:
        assert torch.equal(moved, original.bfloat16())
    assert sum(moved.numel() for moved, _ in parts) == 64
