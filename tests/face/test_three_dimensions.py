"""A pipeline of tensor-parallel stages, each shared by data-parallel ranks, against one process with the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import eventful_cases
import pytest
import torch
import torch.nn.functional as F
from cells import slow
from harness import run_ranks
from tensor_cases import BATCH, Block, Gpt, batch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from zero_optim import ShardedAdamW, shard_module


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
        self.left_out = False

    def forward(self, x: Tensor) -> Tensor:
        """Without its block where that is ``left_out``."""
        return self.head(self.norm(x if self.left_out else self.blocks["1"](x)))


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


def prepared(module: nn.Module) -> nn.Module:
    """A slice of the last stage is frozen."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != "blocks.1.up.weight")
    return module


def train(rank: int, world_size: int, stage: int, folder: str) -> eventful_cases.Outcome:
    """Rank 3, of the first stage, overflows in one slice; in another step the last stage leaves out its block."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    number = mesh.get_local_rank("pp")

    def make(**options: Any) -> eventful_cases.Job:
        module = prepared(cut((First, Last)[number](make_gpt()), mesh["tp"]))
        if stage == 3:
            shard_module(module, (Block,), mesh=mesh["dp"])
        options |= {"stage": stage, "mesh": mesh["dp"], "pipeline": mesh["pp"]}
        opt = ShardedAdamW(module.named_parameters(), **eventful_cases.HYPER, **options)
        of_pipeline = pipelining.PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = pipelining.Schedule1F1B(of_pipeline, BATCH, loss_fn=loss_of)

        def backwards(step: int) -> None:
            module.left_out = number == 1 and step == eventful_cases.ABSENT
            x, y = batch(mesh.get_local_rank("dp"), step)
            with opt.no_sync():
                schedule.step(x) if number == 0 else schedule.step(target=y)
            if rank == 3 and step == eventful_cases.OVERFLOW:
                module.blocks["0"].up.weight.grad.to_local()[0, 0] = math.inf

        return eventful_cases.Job(module, opt, backwards)

    return eventful_cases.train(make, f"{folder}/stage-{number}")


# At stage 2 norms of a pipeline of tensor-parallel stages, and each of the two by itself, see what this one would.
@pytest.mark.parametrize("stage", [pytest.param(2, marks=slow), 3])
def test_pipeline_tensor_parallelism_and_sharing_train_as_one_process_does(stage: int, tmp_path: Path) -> None:
    """With all that may happen: overflows, absent and frozen gradients; checkpoints, whole states, state off the
    device. Stage 0 meets tensor parallelism and a pipeline one at a time, in the tests of these."""
    model = prepared(make_gpt())

    def backwards(step: int) -> None:
        for replica in range(2):
            x, y = batch(replica, step)
            out = model(x, use=(0,) if step == eventful_cases.ABSENT else (0, 1))
            (loss_of(out, y) / 2).backward()

    outcomes = run_ranks(8, train, stage, str(tmp_path), timeout=120)
    eventful_cases.assert_as_in_one_process(outcomes, model, backwards, tolerance=1e-5)
