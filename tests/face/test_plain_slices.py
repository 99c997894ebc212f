"""Tensor parallelism without DTensors: plain slices with Megatron's marks, against the whole model in one process."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from megatron_cases import HYPER, Block, Model, loss_of, make_model, slice_of
from oracle import Hyper, MasterAdamW, accumulate, pack_rounded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_cases import TINY_CAP_MB, difference, linear_backward, maybe_no_sync
from zero_optim import (
    GradientError,
    GradScaler,
    ParameterError,
    RankMismatchError,
    ShardedAdamW,
    full_model_state_dict,
    full_state_dict,
    gather_parameters,
    shard_module,
)

TENSOR = 2
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to train."""

    stage: int = 2
    steps: int = 3
    micro: int = 1
    no_sync: bool = False
    clip: tuple[float, float] | None = None
    scaler: bool = False
    overflow_on: int | None = None
    """The rank whose loss is infinite in the first step."""
    options: dict[str, Any] = field(default_factory=dict)


def make_mesh(data: int, tensor: int = TENSOR) -> dist.DeviceMesh:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


def make_optimizer(way: Way, model: Model, mesh: dist.DeviceMesh) -> ShardedAdamW:
    given = {"mesh": mesh["dp"], "tensor_parallel": mesh["tp"]}
    if way.stage == 3:
        shard_module(model, (Block,), **given)
        given = {}
    return ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=way.stage, **way.options)


def train(rank: int, way: Way, mesh: dist.DeviceMesh) -> Outcome:
    model = make_model(mesh["tp"].get_group())
    opt = make_optimizer(way, model, mesh)
    scaler = GradScaler(init_scale=2.0**10) if way.scaler else None
    norms = []
    for step in range(way.steps):
        for micro in range(way.micro):
            with maybe_no_sync(opt, way.no_sync and micro < way.micro - 1):
                loss = loss_of(model, mesh.get_local_rank("dp"), step, micro)
                if way.overflow_on == rank and step == 0:
                    loss = loss * math.inf
                (loss if scaler is None else scaler.scale(loss)).backward()
        if way.clip is not None:
            if scaler is not None:
                scaler.unscale_(opt)
            norms.append(float(opt.clip_grad_norm_(*way.clip)))
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        opt.zero_grad()
    found = {
        "parameters": full_model_state_dict(model, rank=None),
        "norms": norms,
        "state": full_state_dict(opt, rank=None)["state"],
        "skipped": opt.stats()["skipped_steps"],
    }
    opt.close()
    return found


def alone(way: Way, data: int) -> tuple[dict[str, Tensor], list[float], dict[int, dict[str, Tensor]]]:
    model = make_model()
    opt = torch.optim.AdamW(model.parameters(), **HYPER)
    norms = []
    for step in range(way.steps):
        if way.overflow_on is not None and step == 0:
            norms.append(math.nan)
            continue
        for micro in range(way.micro):
            (sum(loss_of(model, rank, step, micro) for rank in range(data)) / data).backward()
        if way.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), *way.clip)))
        opt.step()
        opt.zero_grad()
    return dict(model.named_parameters()), norms, opt.state_dict()["state"]


def compare(found: Outcome, way: Way, data: int, rank: int) -> None:
    parameters, norms, state = alone(way, data)
    own = rank % TENSOR
    for index, (name, whole) in enumerate(parameters.items()):
        wanted = slice_of(name, whole.detach(), own, TENSOR)
        torch.testing.assert_close(found["parameters"][name], wanted, rtol=1e-5, atol=1e-5)
        for kind in ("exp_avg", "exp_avg_sq"):
            wanted = slice_of(name, state[index][kind], own, TENSOR)
            torch.testing.assert_close(found["state"][index][kind], wanted, rtol=1e-4, atol=1e-5)
    assert found["norms"] == pytest.approx(norms, rel=1e-4, nan_ok=True)
    assert found["skipped"] == (way.overflow_on is not None)


WAYS = {
    "clipped by norm 2": Way(clip=(0.5, 2.0)),
    "clipped by the largest": Way(clip=(0.01, math.inf)),
    "clipped by norm 3, no_sync": Way(clip=(0.1, 3.0), micro=3, no_sync=True),
    "several backwards": Way(clip=(0.5, 1.0), micro=2),
    "clipped by the option": Way(options={"max_grad_norm": 1e9}),
    "an overflow on one rank": Way(scaler=True, overflow_on=3, clip=(0.5, 2.0)),
    "state off the device": Way(options={"state_offload": "cpu"}, micro=2),
}


def outcomes(rank: int, world_size: int, ways: list[Way]) -> list[Outcome]:
    mesh = make_mesh(world_size // TENSOR)
    return [train(rank, way, mesh) for way in ways]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_as_one_process_does(stage: int) -> None:
    ways = [replace(way, stage=stage) for way in WAYS.values()]
    for rank, found in enumerate(run_ranks(4, outcomes, ways, timeout=120)):
        for way, of_way in zip(ways, found, strict=True):
            compare(of_way, way, 2, rank)


def test_one_data_parallel_rank_trains_as_one_process_does() -> None:
    """Terms are added up, once each, also where a rank averages with no other."""
    ways = [Way(stage, micro=2, clip=(0.5, 2.0), no_sync=no_sync) for stage in (0, 1, 2) for no_sync in (False, True)]
    for rank, found in enumerate(run_ranks(TENSOR, outcomes, ways, timeout=120)):
        for way, of_way in zip(ways, found, strict=True):
            compare(of_way, way, 1, rank)
