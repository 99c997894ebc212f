"""Modes of torch that change what tensors are: what was made in one trains outside of it, or is refused by name."""

from __future__ import annotations

import contextlib

import pytest
import torch
import zero_optim
from harness import run_ranks
from sharded_cases import Block, Net, gathered, tokens
from torch import Tensor, nn
from training_cases import assert_bitwise


def _trained(rank: int, world_size: int, stage: int, inference: bool) -> list[list[Tensor]]:
    """A model whose optimizer is made, and later grows, in ``inference_mode``, or not."""
    mode = torch.inference_mode if inference else contextlib.nullcontext
    torch.manual_seed(0)
    model = Net()
    model.norm.requires_grad_(False)  # it is thawed later
    with mode():
        if stage == 3:
            zero_optim.shard_module(model, [Block])
        opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2, stage=stage)
    for step in range(4):
        if step == 2:
            model.norm.requires_grad_(True)
        model(tokens(rank, step)).square().mean().backward()
        with mode() if step == 2 else contextlib.nullcontext():
            opt.step()
        opt.zero_grad()
    added = nn.Parameter(torch.ones(3))
    if stage < 3:
        with mode():
            opt.add_param_group({"params": [("added", added)]})
        added.square().sum().backward()
        opt.step()
    opt.close()
    return [list(gathered(model).values()), [added.detach().clone()]]


@pytest.mark.parametrize(("stage", "world_size"), [(2, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_an_optimizer_made_in_inference_mode_trains_as_any(stage: int, world_size: int) -> None:
    made_there = run_ranks(world_size, _trained, stage, True)
    for (params, added), (expected, expected_added) in zip(
        made_there, run_ranks(world_size, _trained, stage, False), strict=True
    ):
        assert_bitwise(params, expected)
        assert_bitwise(added, expected_added)


def _made_in_inference_mode(rank: int, world_size: int) -> list[str]:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(7, 5))
    messages = []
    for refuses in (
        lambda: zero_optim.ShardedAdamW(model.named_parameters()),
        lambda: zero_optim.shard_module(model, [nn.Linear]),
    ):
        with pytest.raises(zero_optim.ParameterError) as caught:
            refuses()
        messages.append(str(caught.value))
    return messages


def test_parameters_made_in_inference_mode_are_refused_by_name() -> None:
    """torch.optim.AdamW takes them, and their first forward fails."""
    for message in _made_in_inference_mode(0, 1):
        assert "'0.weight' was made under torch.inference_mode" in message


def _loaded_by_swapping(rank: int, world_size: int, swap: bool) -> tuple[list[list[Tensor]], bool]:
    """A sharded model loads a whole state, and later its own shards; it trains after each."""
    torch.manual_seed(1)
    whole = Net().state_dict()
    torch.manual_seed(0)
    model = Net()
    zero_optim.shard_module(model, [Block])
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2)
    before, results = list(model.parameters()), []
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for state in (whole, model.state_dict()):
            model.load_state_dict(state)
            model(tokens(rank, 0)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            results.append(list(gathered(model).values()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    opt.close()
    return results, all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_a_sharded_model_loads_where_torch_swaps_tensors() -> None:
    """torch gives a parameter the inside of another tensor then. A shard lost its own, and was not trained any more."""
    swapped, copied = (run_ranks(2, _loaded_by_swapping, swap) for swap in (True, False))
    for (results, same), (expected, _) in zip(swapped, copied, strict=True):
        assert same
        for params, others in zip(results, expected, strict=True):
            assert_bitwise(params, others)
