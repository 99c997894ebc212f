"""Topologies on four NCCL ranks, which may share a GPU, against one process: meshes of replicas and shards, tensor
parallelism, experts, and replicas that share Muon's work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import expert_cases
import grid_cases
import pytest
import sharded_cases
import tensor_cases
import torch
import zero_optim
from nccl_ranks import on_nccl_ranks
from places import DEVICE
from torch import Tensor, nn

pytestmark = pytest.mark.gpu

RANKS, STEPS = 4, 3
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
TOLERANCE = 2e-5  # of parameters: sums of a GPU have another order
Weights = dict[str, Tensor]


_on_ranks = partial(on_nccl_ranks, RANKS, timeout=110)


def _train(opt: zero_optim.ShardedOptimizer, loss_of: Callable[[int], Tensor]) -> None:
    for step in range(STEPS):
        loss_of(step).backward()
        opt.step()
        opt.zero_grad()
    opt.wait_for_parameters()


def _whole(model: nn.Module, opt: zero_optim.ShardedOptimizer) -> Weights:
    """Collective. The optimizer is closed."""
    found = {name: value.cpu().clone() for name, value in zero_optim.iter_full_parameters(model)}
    opt.close()
    return found


def _check(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        told = f"{name} is off by {(found[name] - value).abs().max():.1e}"
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=told)


def _alone(model: nn.Module, losses: Callable[[int], list[Tensor]]) -> Weights:
    """In one process on the CPU: the mean of the losses of a step."""
    opt = torch.optim.AdamW(model.parameters(), **HYPER)
    for step in range(STEPS):
        of_ranks = losses(step)
        (sum(of_ranks) / len(of_ranks)).backward()
        opt.step()
        opt.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


# ---- replicas and shards ---------------------------------------------------------------------------------------------


def _grid(rank: int, world_size: int, stage: int, offload: str | None) -> Weights:
    torch.manual_seed(0)
    model, mesh = sharded_cases.Net().to(DEVICE), grid_cases.make_mesh(2, 2, DEVICE)
    if stage == 3:
        zero_optim.shard_module(model, (sharded_cases.Block,), mesh=mesh)
    given = {} if stage == 3 else {"mesh": mesh, "bucket_cap_mb": 0.02}
    opt = zero_optim.ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=stage, state_offload=offload)
    _train(opt, lambda step: sharded_cases.loss_of(model, sharded_cases.tokens(rank, step).to(DEVICE)))
    return _whole(model, opt)


@pytest.mark.parametrize(("stage", "offload"), [(1, None), (2, None), (2, "cpu"), (3, None)])
def test_replicas_of_shards(stage: int, offload: str | None) -> None:
    torch.manual_seed(0)
    model = sharded_cases.Net()
    wanted = _alone(
        model,
        lambda step: [sharded_cases.loss_of(model, sharded_cases.tokens(rank, step)) for rank in range(RANKS)],
    )
    wanted["head.weight"] = wanted["embedding.weight"]
    for found in _on_ranks(_grid, stage, offload):
        _check({"head.weight": found["embedding.weight"], **found}, wanted)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def _tensor_parallel(rank: int, world_size: int, stage: int) -> Weights:
    way, mesh = tensor_cases.Way(stage=stage), tensor_cases.make_mesh(2, 2, DEVICE)
    model = tensor_cases.make_model(way, mesh["tp"], device=DEVICE)
    if stage == 3:
        zero_optim.shard_module(model, (tensor_cases.Block,), mesh=mesh["dp"])
    given = {} if stage == 3 else {"mesh": mesh["dp"]}
    opt = zero_optim.ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=stage)
    with tensor_cases.losses(sequence=True):
        _train(opt, lambda step: tensor_cases.loss_of(model, rank // 2, step))
    return _whole(model, opt)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensor_parallel(stage: int) -> None:
    model = tensor_cases.make_model(tensor_cases.Way())
    wanted = _alone(model, lambda step: [tensor_cases.loss_of(model, data, step) for data in range(2)])
    for found in _on_ranks(_tensor_parallel, stage):
        _check(found, wanted)


# ---- experts ---------------------------------------------------------------------------------------------------------


def _experts(rank: int, world_size: int, stage: int) -> tuple[int, Weights]:
    way, mesh = expert_cases.Way(stage=stage, steps=STEPS), expert_cases.make_mesh(device=DEVICE)
    model = expert_cases.make_model(way, mesh, DEVICE)
    if stage == 3:
        zero_optim.shard_module(model, (nn.Linear,), experts={"experts": mesh["edp"]})
    opt = zero_optim.ShardedAdamW(expert_cases.groups_of(model, mesh), **HYPER, stage=stage)
    _train(opt, lambda step: way.loss(model, rank, step, 0, way.routes(mesh, step)))
    with zero_optim.gather_parameters(model):
        found = {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
    opt.close()
    return mesh.get_local_rank("ep"), found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts(stage: int) -> None:
    way = expert_cases.Way(stage=stage, steps=STEPS)
    model = expert_cases.make_model(way)
    wanted = _alone(
        model, lambda step: [way.loss(model, rank, step, 0, way.route(rank, step)) for rank in range(RANKS)]
    )
    each = expert_cases.EXPERTS // 2
    for part, found in _on_ranks(_experts, stage):
        own = {f"experts.{number}.": f"experts.{part * each + number}." for number in range(each)}
        renamed = {next((n.replace(a, b) for a, b in own.items() if n.startswith(a)), n): v for n, v in found.items()}
        _check(renamed, {name: wanted[name] for name in renamed})


# ---- Muon ------------------------------------------------------------------------------------------------------------


def _muons_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(72, 72) for _ in range(3))).to(torch.bfloat16)


def _by_muon(rank: int, world_size: int, stage: int, replicas: str) -> Weights:
    model = _muons_model().to(DEVICE)
    mesh = grid_cases.make_mesh(2, 2, DEVICE)
    if stage == 3:
        zero_optim.shard_module(model, (nn.Linear,), mesh=mesh)
    given: dict[str, Any] = {"mesh": mesh} if stage in (1, 2) else {}
    matrices, others = zero_optim.ShardedMuon.split(model)
    groups = [{"params": matrices}, {"params": others, "rule": zero_optim.rules.AdamW(lr=1e-2)}]
    opt = zero_optim.ShardedMuon(groups, lr=0.02, stage=stage, max_grad_norm=1.0, ns_replicas=replicas, **given)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(8, 72, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(x.to(DEVICE, torch.bfloat16)).float().square().mean()

    _train(opt, loss_of)
    return _whole(model, opt)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_replicas_that_share_muons_work_have_the_bits_of_those_that_repeat_it(stage: int) -> None:
    shared, repeated = (_on_ranks(_by_muon, stage, replicas) for replicas in ("share", "repeat"))
    for found in (*shared, *repeated):
        assert all(torch.equal(value, shared[0][name]) for name, value in found.items())
    began = _muons_model().state_dict()
    assert all(not torch.equal(value, began[name]) for name, value in shared[0].items())
