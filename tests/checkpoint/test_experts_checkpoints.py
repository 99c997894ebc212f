"""Experts that are slices of one parameter, saved on one mesh and loaded on others: whole, and bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoint_cases import assert_bits
from harness import run_ranks
from small_jobs import all_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from zero_optim import ShardedAdamW, checkpoint

SHAPES = {"dense": (5, 3), "experts": (4, 6, 2)}
LR = 1e-2


@dataclass(frozen=True)
class Mesh:
    """``replicas`` of experts in ``parts``: so many ranks have the same ones, and so many have others."""

    replicas: int
    parts: int
    stage: int


SAVED = Mesh(2, 2, 2)
LOADED = (Mesh(1, 4, 1), Mesh(2, 2, 0), Mesh(4, 1, 2), Mesh(1, 2, 2), Mesh(1, 1, 1))


def whole(name: str, seed: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed + len(name)))


class Job:
    def __init__(self, mesh: Mesh, dtype: torch.dtype, seed: int) -> None:
        ranks = init_device_mesh("cpu", (mesh.replicas, mesh.parts), mesh_dim_names=("edp", "ep"))
        self._part, self._parts = ranks.get_local_rank("ep"), mesh.parts
        own = self._own(whole("experts", seed)).to(dtype).clone()
        experts = nn.Parameter(DTensor.from_local(own, ranks["ep"], [Shard(0)], run_check=False))
        self.model = nn.ParameterDict({"dense": nn.Parameter(whole("dense", seed).to(dtype)), "experts": experts})
        groups = [
            {"params": [("dense", self.model["dense"])]},
            {"params": [("experts", experts)], "mesh": ranks["edp"], "grad_divisor": mesh.replicas},
        ]
        self.opt = ShardedAdamW(groups, lr=LR, stage=mesh.stage, grad_reduce_dtype=torch.float32)

    def _own(self, experts: Tensor) -> Tensor:
        return experts.chunk(self._parts)[self._part]

    def train(self, seed: int) -> None:
        """One step, with the same gradients on any mesh."""
        loss = (self.model["dense"].float() * whole("dense", seed)).sum()
        loss = loss + (self.model["experts"].to_local().float() * self._own(whole("experts", seed))).sum()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()


def save(rank: int, world_size: int, folder: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    job = Job(SAVED, dtype, seed=0)
    job.train(1)
    checkpoint.save(folder, job.model, job.opt, step=1)
    saved = all_of(job.model, job.opt)
    job.train(2)
    return saved, all_of(job.model, job.opt)


def load(
    rank: int, world_size: int, mesh: Mesh, folder: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    job = Job(mesh, dtype, seed=50)
    checkpoint.load(folder, job.model, job.opt)
    loaded = all_of(job.model, job.opt)
    job.train(2)
    return loaded, all_of(job.model, job.opt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_loads_on_any_other_mesh_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    saved, *others = run_ranks(4, save, str(tmp_path), dtype)
    assert saved[0].keys() == saved[1].keys() and not torch.equal(saved[0]["experts"], saved[1]["experts"])
    loaded = [
        of_rank
        for mesh in LOADED
        for of_rank in run_ranks(mesh.replicas * mesh.parts, load, mesh, str(tmp_path), dtype)
    ]
    for of_rank in (*others, *loaded):
        for found, wanted in zip(of_rank, saved, strict=True):
            assert_bits(found, wanted)
