"""An optimizer where it cannot work: in DDP, made before the process group, copied."""

from __future__ import annotations

import copy
import pickle
import warnings
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


def test_shared_memory_without_ranks_is_refused() -> None:
    model = nn.Linear(4, 4).share_memory()
    with pytest.raises(zero_optim.ParameterError, match=r"'weight' is in shared memory.*copy\.deepcopy\(model\)"):
        zero_optim.ShardedAdamW(model.named_parameters())
    with pytest.raises(zero_optim.ParameterError, match="'weight' is in shared memory"):
        zero_optim.shard_module(model, (nn.Linear,))
    zero_optim.ShardedAdamW(copy.deepcopy(model).named_parameters()).close()


def _spawned_with(rank: int, world_size: int) -> torch.Tensor:
    """As where a model is an argument of ``torch.multiprocessing.spawn``: it arrives in shared memory."""
    model = nn.Linear(4, 4).share_memory()
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    opt.step()
    return model.weight.detach().clone()


def test_ranks_may_be_given_a_model_in_shared_memory() -> None:
    first, second = run_ranks(2, _spawned_with)
    assert torch.equal(first, second)


def _replaced(rank: int, world_size: int, stage: int, how: str, known: str) -> list[str]:
    """What four steps warn of: the embedding is replaced after the second, and the last layer is never used."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"emb": nn.Embedding(8, 4), "unused": nn.Linear(4, 2), "out": nn.Linear(4, 4)})
    if stage == 3:
        zero_optim.shard_module(model, (nn.Linear,))
    params = model.parameters() if known == "generator" else list(model.parameters())
    opt = zero_optim.ShardedAdamW(params, stage=stage)
    if known == "attach":
        opt.attach(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if step == 2:
                whole = {
                    name: torch.zeros_like(value) for name, value in zero_optim.full_model_state_dict(model).items()
                }
                with zero_optim.gather_parameters(model, writeback=True):
                    if how == "module":
                        model["emb"] = nn.Embedding(9, 4)
                    elif how == "parameter":
                        model["emb"].weight = nn.Parameter(torch.zeros(9, 4))
                    elif how == "assign" and rank == 0:
                        model.load_state_dict(whole, assign=True)
            model["out"](model["emb"](torch.arange(8))).sum().backward()
            opt.step()
            opt.zero_grad()
    opt.close()
    return [str(warning.message) for warning in caught if "replaced" in str(warning.message)]


@pytest.mark.parametrize(
    ("stage", "how", "known", "lost"),
    [
        (0, "module", "generator", ["emb.weight"]),
        (2, "module", "attach", ["emb.weight"]),
        (2, "parameter", "generator", ["emb.weight"]),
        (2, "assign", "generator", ["emb.weight", "out.weight", "out.bias"]),
        (2, "nothing", "generator", []),
        (2, "module", "list", []),  # nothing shows the model
        (3, "module", "list", ["emb.weight"]),
    ],
)
def test_a_parameter_that_was_replaced_in_the_model_is_named_once(
    stage: int, how: str, known: str, lost: list[str]
) -> None:
    for rank, found in enumerate(run_ranks(2, _replaced, stage, how, known)):
        assert len(found) == (bool(lost) and not (how == "assign" and rank))
        for message in found:
            shapes = {"emb.weight": "(8, 4)", "out.weight": "(4, 4)", "out.bias": "(4,)"}
            named = known == "attach" or stage == 3
            assert all((name if named else shapes[name]) in message for name in lost) and "unused" not in message
            assert "replaced in the model after the optimizer was made" in message and "(2, 4)" not in message


def test_a_parameter_that_was_never_in_the_model_was_not_replaced() -> None:
    model, criterion = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = zero_optim.ShardedAdamW(model.parameters())
    optimizer.add_param_group({"params": [*criterion.parameters()]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.close()


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
