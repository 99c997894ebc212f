"""A pipeline of tensor-parallel stages, each shared by data-parallel ranks, against one process with the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from tensor_cases import BATCH, HYPER, Block, Gpt, batch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from zero_optim import ShardedAdamW, iter_full_parameters

STEPS, MAX_NORM = 3, 0.5


def make_gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt()


class First(nn.Module):
    """Named as in the whole model."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.tokens, self.blocks = model.tokens, nn.ModuleDict({"0": model.blocks[0]})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks["0"](self.tokens(tokens))


class Last(nn.Module):
    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleDict({"1": model.blocks[1]}), model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks["1"](x)))


def cut(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """With sequence parallelism: what a stage sends to the next is a part of the sequence."""
    plan: dict[str, object] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name, module in stage.named_modules():
        if isinstance(module, Block):
            plan |= {f"{name}.{of}": ColwiseParallel(input_layouts=Shard(1)) for of in ("q", "k", "v", "up")}
            plan |= {f"{name}.{of}": RowwiseParallel(output_layouts=Shard(1)) for of in ("out", "down")}
            plan |= {f"{name}.{of}": SequenceParallel() for of in ("norm1", "norm2")}
    there = {name for name, _ in stage.named_modules()}
    return parallelize_module(stage, mesh, {name: style for name, style in plan.items() if name in there})


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def train(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    number = mesh.get_local_rank("pp")
    module = cut((First, Last)[number](make_gpt()), mesh["tp"])
    opt = ShardedAdamW(module.named_parameters(), **HYPER, stage=2, mesh=mesh["dp"], pipeline=mesh["pp"])
    stage = pipelining.PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = pipelining.Schedule1F1B(stage, BATCH, loss_fn=loss_of)
    norms = []
    for step in range(STEPS):
        x, y = batch(mesh.get_local_rank("dp"), step)
        with opt.no_sync():
            schedule.step(x) if number == 0 else schedule.step(target=y)
        norms.append(opt.clip_grad_norm_(MAX_NORM).item())
        opt.step()
        opt.zero_grad()
    found = {name: whole.clone() for name, whole in iter_full_parameters(module)}
    opt.close()
    return found, norms


def test_pipeline_tensor_parallelism_and_sharing_train_as_one_process_does() -> None:
    model, norms = make_gpt(), []
    opt = torch.optim.AdamW(model.parameters(), **HYPER)
    for step in range(STEPS):
        for replica in range(2):
            x, y = batch(replica, step)
            (loss_of(model(x), y) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        opt.step()
        opt.zero_grad()
    assert min(norms) > MAX_NORM  # each step is clipped
    expected, seen = dict(model.named_parameters()), set()
    for found, own_norms in run_ranks(8, train, timeout=120):
        assert own_norms == pytest.approx(norms, rel=1e-4)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-5)
        seen |= found.keys()
    assert seen == expected.keys()
