"""Experts that are slices of one parameter, saved on one mesh and loaded on others: whole, and bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from checkpoint_cases import assert_bits
from harness import run_ranks
from small_jobs import all_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from zero_optim import ShardedAdamW, checkpoint, shard_module

SHAPES = {"dense": (5, 3), "experts": (4, 6, 2)}
LR = 1e-2


@dataclass(frozen=True)
class Mesh:
    """``replicas`` of experts in ``parts``: so many ranks have the same ones, and so many have others."""

    replicas: int
    parts: int
    stage: int
    options: dict[str, str] = field(default_factory=dict)


SAVED = Mesh(2, 2, 2), Mesh(2, 2, 3), Mesh(1, 4, 3)
LOADED = (
    (Mesh(1, 4, 1), Mesh(2, 2, 0), Mesh(4, 1, 2), Mesh(1, 2, 2), Mesh(1, 1, 1), Mesh(1, 4, 3), Mesh(2, 2, 3)),
    (Mesh(1, 4, 3), Mesh(2, 1, 3), Mesh(4, 1, 3, {"param_offload": "cpu"}), Mesh(1, 2, 2), Mesh(1, 1, 3)),
    (Mesh(2, 2, 3, {"param_offload": "cpu"}), Mesh(1, 2, 3), Mesh(4, 1, 0)),
)


def whole(name: str, seed: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed + len(name)))


class Product(nn.Module):
    """With numbers [as its parameter], summed."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.weight = parameter

    def forward(self, numbers: Tensor) -> Tensor:
        local = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return (local.float() * numbers).sum()


class Job:
    def __init__(self, mesh: Mesh, dtype: torch.dtype, seed: int) -> None:
        ranks = init_device_mesh("cpu", (mesh.replicas, mesh.parts), mesh_dim_names=("edp", "ep"))
        self._part, self._parts = ranks.get_local_rank("ep"), mesh.parts
        own = self._own(whole("experts", seed)).to(dtype).clone()
        experts = nn.Parameter(DTensor.from_local(own, ranks["ep"], [Shard(0)], run_check=False))
        dense = nn.Parameter(whole("dense", seed).to(dtype))
        self.model = nn.ModuleDict({"dense": Product(dense), "experts": Product(experts)})
        if mesh.stage == 3:
            shard_module(self.model, ("dense",), experts={"experts": ranks["edp"]}, **mesh.options)
        of_experts = {"mesh": ranks["edp"]} if mesh.stage < 3 else {}  # at stage 3 the model has it
        groups = [
            {"params": [("dense.weight", dense)]},
            {"params": [("experts.weight", experts)], "grad_divisor": mesh.replicas, **of_experts},
        ]
        self.opt = ShardedAdamW(groups, lr=LR, stage=mesh.stage, grad_reduce_dtype=torch.float32)

    def _own(self, experts: Tensor) -> Tensor:
        return experts.chunk(self._parts)[self._part]

    def train(self, seed: int) -> None:
        """One step, with the same gradients on any mesh."""
        loss = self.model["dense"](whole("dense", seed))
        (loss + self.model["experts"](self._own(whole("experts", seed)))).backward()
        self.opt.step()
        self.opt.zero_grad()


def save(
    rank: int, world_size: int, mesh: Mesh, folder: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    job = Job(mesh, dtype, seed=0)
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
@pytest.mark.parametrize(("of", "to"), list(zip(SAVED, LOADED, strict=True)), ids=str)
def test_loads_on_any_other_mesh_bit_for_bit(
    of: Mesh, to: tuple[Mesh, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    saved, *others = run_ranks(4, save, of, str(tmp_path), dtype)
    assert saved[0].keys() == saved[1].keys()
    assert not torch.equal(saved[0]["experts.weight"], saved[1]["experts.weight"])
    loaded = [
        of_rank for mesh in to for of_rank in run_ranks(mesh.replicas * mesh.parts, load, mesh, str(tmp_path), dtype)
    ]
    for of_rank in (*others, *loaded):
        for found, wanted in zip(of_rank, saved, strict=True):
            assert_bits(found, wanted)
