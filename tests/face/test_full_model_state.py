"""``full_model_state_dict``: the weights that a client saves, from a model at any stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from sharded_cases import Block, Net, allocated
from torch import Tensor, nn
from zero_optim import ShardAccessError, full_model_state_dict, shard_module


class Mixed(Net):
    """Frozen and tied parameters, buffers of which one is not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.history = ["first"]

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


def make(rank: int, stage: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model whose optimizer has made one step, and its parameters as that leaves them."""
    torch.manual_seed(rank)
    model = Mixed()
    if stage == 3:
        shard_module(model, [Block])
    optimizer = zero_optim.ShardedAdamW(model.named_parameters(), lr=0.1, stage=stage)
    model(torch.arange(8).view(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.close()
    with zero_optim.gather_parameters(model):
        return model, {name: value.detach().clone() for name, value in model.state_dict().items() if name[0] != "_"}


def both(rank: int, world_size: int, stage: int) -> None:
    model, expected = make(rank, stage)
    for wanted in (0, world_size - 1, None):
        state = full_model_state_dict(model, wanted)
        if wanted not in (rank, None):
            assert state == {}
            continue
        assert list(state) == list(Mixed().state_dict()) and state["_extra_state"] == ["first"]
        assert state["_extra_state"] is not model.history
        assert all(type(value) is Tensor and torch.equal(value, expected[name]) for name, value in tensors(state))
        assert state["head.weight"] is state["embedding.weight"]
        ordinary = Mixed()
        ordinary.load_state_dict(state)
        assert torch.equal(ordinary.blocks[2].up.weight, expected["blocks.2.up.weight"])
        state["norm.weight"].zero_()  # it is a copy
    with zero_optim.gather_parameters(model):
        assert torch.equal(model.norm.weight, expected["norm.weight"])


def tensors(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor)]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_the_state_dict_of_an_ordinary_model(ranks: int, stage: int) -> None:
    run_ranks(ranks, both, stage)


def only_trained(rank: int, world_size: int, stage: int) -> None:
    model, expected = make(rank, stage)
    sharded = getattr(model, "_zero_optim_sharded", None)

    def gathers() -> float:
        return sharded.sharding.world.stats()["gather_parameters"]["calls"] if sharded is not None else 0

    before = gathers()
    state = full_model_state_dict(model, None, trained_only=True)
    assert gathers() - before == (3 if stage == 3 else 0)  # the root and two of three blocks
    trained = [name for name in expected if "blocks.1" not in name and name != "seen"]
    assert list(state) == trained and all(torch.equal(state[name], expected[name]) for name in trained)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_frozen_can_be_left_out(stage: int) -> None:
    run_ranks(2, only_trained, stage)


def refused(rank: int, world_size: int) -> None:
    model, _ = make(rank, 3)
    with pytest.raises(ValueError, match="rank must be None or one of 2 ranks, got 2"):
        full_model_state_dict(model, 2)
    with zero_optim.gather_parameters(model), pytest.raises(ShardAccessError, match="leave that before"):
        full_model_state_dict(model)
    hook = model.blocks[0].register_forward_hook(lambda *_: full_model_state_dict(model))
    with pytest.raises(ShardAccessError, match="call it between steps"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    hook.remove()
    assert len(full_model_state_dict(model)) == (0 if rank else len(Mixed().state_dict()))


def test_it_is_for_between_steps() -> None:
    run_ranks(2, refused)


def out_of_memory(rank: int, world_size: int) -> None:
    model, _ = make(rank, 3)
    moved = Tensor.to

    def fails(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if [*map(str, args)] == ["cpu"] and tensor.shape == (60, 20) and rank == 0:
            raise RuntimeError("no memory left")
        return moved(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", fails)
        with pytest.raises(RuntimeError, match="no memory left" if rank == 0 else "rank 0 failed with RuntimeError"):
            full_model_state_dict(model)
    assert len(full_model_state_dict(model)) == (0 if rank else len(Mixed().state_dict()))


def test_a_rank_without_memory_fails_on_all() -> None:
    run_ranks(2, out_of_memory)


def peak(rank: int, world_size: int) -> tuple[int, int, int]:
    """Bytes at most, of the largest unit, and of the model."""
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(16)))
    shard_module(model, [nn.Linear])
    total = sum(parameter.numel() for parameter in model.parameters()) * 4
    full_model_state_dict(model)
    return allocated(lambda: full_model_state_dict(model)).peak, 4 * 10_100, total


def test_memory_is_the_result_on_one_rank_and_a_unit_on_the_others() -> None:
    (first, unit, total), (second, _, _) = run_ranks(2, peak)
    assert total <= first < total + 3.2 * unit
    assert second < 3.2 * unit
