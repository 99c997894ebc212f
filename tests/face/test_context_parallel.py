"""Ranks with parts of one sequence: gradients are averaged over both dimensions of a mesh, given as one."""

from __future__ import annotations

from pathlib import Path

import eventful_cases
import pytest
import torch
from cells import slow
from harness import run_ranks
from sharded_cases import gathered
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zero_optim import ShardedAdamW, shard_module

DP, CP, TOKENS, WIDTH = 2, 2, 8, 12


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, WIDTH))


def sequence(step: int, replica: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica))


def train(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], float]:
    mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    model = make()
    if stage == 3:
        shard_module(model, (nn.Linear,), mesh=both)
    opt = ShardedAdamW(model.named_parameters(), lr=1e-2, stage=stage, mesh=both)
    norm = 0.0
    for step in range(3):
        opt.zero_grad()
        own = sequence(step, mesh.get_local_rank("dp")).chunk(CP)[mesh.get_local_rank("cp")]
        model(own).square().mean().backward()
        norm = opt.clip_grad_norm_(0.1).item()
        opt.step()
    return gathered(model), norm


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_averaged_over_both_dimensions(stage: int) -> None:
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norm = 0.0
    for step in range(3):
        opt.zero_grad()
        for replica in range(DP):
            (model(sequence(step, replica)).square().mean() / DP).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        opt.step()
    expected = dict(model.named_parameters())
    for values, found in run_ranks(DP * CP, train, stage):
        assert found == pytest.approx(norm, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)


def all_that_happens(rank: int, world_size: int, stage: int, folder: str) -> eventful_cases.Outcome:
    mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))
    replica, part = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    data = lambda step, micro: sequence(10 * step + micro, replica).chunk(CP)[part]  # noqa: E731
    return eventful_cases.train_net(rank, stage, mesh["dp", "cp"]._flatten("dp_cp"), data, folder)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), 1, pytest.param(2, marks=slow), 3])
def test_all_that_may_happen(stage: int, tmp_path: Path) -> None:
    """Overflows, absent and frozen gradients, ``no_sync``; checkpoints, whole states, state off the device."""
    outcomes = run_ranks(DP * CP, all_that_happens, stage, str(tmp_path))
    everything = lambda step, micro: torch.cat([sequence(10 * step + micro, of) for of in range(DP)])  # noqa: E731
    eventful_cases.assert_net_as_in_one_process(outcomes, everything)
