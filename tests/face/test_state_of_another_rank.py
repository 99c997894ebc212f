"""A rank's ``state_dict`` on another rank, where that has other parameters of the same names and shapes: refused.

Files of one a rank are easily mixed up, or rank 0's is read by all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from training_cases import error_of
from zero_optim import ShardedAdamW

WIDTH = 6


def _mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=names)


def _slices() -> ShardedAdamW:
    mesh, weight = _mesh("dp", "tp"), nn.Parameter(torch.zeros(4, WIDTH))
    weight.tensor_model_parallel = True
    return ShardedAdamW([("weight", weight)], mesh=mesh["dp"], tensor_parallel=mesh["tp"])


def _dtensors() -> ShardedAdamW:
    mesh = _mesh("dp", "tp")
    weight = nn.Parameter(DTensor.from_local(torch.zeros(4, WIDTH), mesh["tp"], [Shard(0)]))
    return ShardedAdamW([("weight", weight)], mesh=mesh["dp"])


def _experts() -> ShardedAdamW:
    mesh = _mesh("edp", "ep")
    dense, experts = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(4, WIDTH))
    of_experts = {"params": [("experts", experts)], "mesh": mesh["edp"], "grad_divisor": 2}
    return ShardedAdamW([{"params": [("dense", dense)]}, of_experts])


def _stages() -> ShardedAdamW:
    mesh = _mesh("dp", "pp")
    weight = nn.Parameter(torch.zeros(4, WIDTH))
    return ShardedAdamW([("weight", weight)], mesh=mesh["dp"], pipeline=mesh["pp"])


MADE: dict[str, tuple[Callable[[], ShardedAdamW], str]] = {
    "slices": (_slices, "the slice of 'weight' is number {there} of 2 there, and {here} of 2 here"),
    "DTensors": (_dtensors, "the slice of 'weight' is number {there} of 2 there, and {here} of 2 here"),
    "experts": (_experts, "the slice of 'experts' is number {there} of 2 there, and {here} of 2 here"),
    "stages": (_stages, "the stage of a pipeline is number {there} of 2 there, and {here} of 2 here"),
}


def _exchange(rank: int, world_size: int, which: str) -> tuple[str, bool]:
    """What the load of the other rank's state says, and whether this rank's own comes back."""
    opt = MADE[which][0]()
    for group in opt.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    opt.step()
    own = opt.state_dict()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, own)
    told = ": ".join(error_of(lambda: opt.load_state_dict(states[1 - rank])))
    before = {key: entry["step"] for key, entry in own["state"].items()}
    opt.load_state_dict(states[rank])
    opt.load_state_dict({name: own[name] for name in ("state", "param_groups")})  # one of before there was a place
    same = before == {key: entry["step"] for key, entry in opt.state_dict()["state"].items()}
    opt.close()
    return told, same


@pytest.mark.parametrize("which", MADE)
def test_the_state_of_another_rank_is_refused(which: str) -> None:
    for rank, (told, same) in enumerate(run_ranks(2, _exchange, which)):
        assert told.startswith("StateMismatchError: ") and MADE[which][1].format(there=1 - rank, here=rank) in told
        assert "each rank loads what itself has saved" in told.lower()
        assert same


def _alone(rank: int, world_size: int) -> list[str]:
    opt = ShardedAdamW([("weight", nn.Parameter(torch.zeros(4, WIDTH)))], stage=2)
    keys = list(opt.state_dict())
    opt.close()
    return keys


def test_where_all_ranks_have_the_same_parameters_there_are_torchs_keys_alone() -> None:
    assert run_ranks(2, _alone) == [["state", "param_groups"]] * 2
