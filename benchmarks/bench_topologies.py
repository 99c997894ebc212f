"""A GPT's training step on several topologies of ranks, against FSDP2 on the same ones.

``flat``: all ranks share. ``hybrid``: two replicas, whose ranks share. ``tensor_parallel``: each block is cut over two
ranks.

python benchmarks/bench_topologies.py --ranks 4 --contenders stage2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from bench_stages import NUMELS, ROUNDS, TAKEN, contest
from script import run_script
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from zero_optim.bench.contenders import FSDP2, FSDP2_ZERO2, OURS, Task
from zero_optim.bench.contest import Say
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.run import Measured, tokens_of
from zero_optim.bench.train_step import hold_all, in_order, make_task
from zero_optim.train.model import GPT

NAME = "topologies"
NAMES = (*OURS[1:], FSDP2, FSDP2_ZERO2)  # at stage 0 nothing is shared, on a mesh or without
RANKS = 4
ABOUT = "Trains a GPT on replicas, and on tensor-parallel ranks, with our stages and with FSDP2."
MENU = Menu({NAME: Choices({**TAKEN, "ranks": str(RANKS)}, gpu=True)})


@dataclass(frozen=True)
class Topology:
    """A topology: the number of replicas of the shared state, and of slices of each block."""

    name: str
    replicas: int = 1
    slices: int = 1


TOPOLOGIES = (Topology("flat"), Topology("hybrid", replicas=2), Topology("tensor_parallel", slices=2))


@dataclass(frozen=True)
class MeshTask(Task):
    topology: Topology = TOPOLOGIES[0]

    @property
    def slices(self) -> int:
        return self.topology.slices

    def spread(self, model: GPT) -> tuple[GPT, dist.DeviceMesh | None]:
        replicas = self.topology.replicas
        shape = replicas, dist.get_world_size() // replicas // self.slices, self.slices
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        if self.slices > 1:
            cut(model, mesh["tensor"])
        return model, mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]


def cut(model: GPT, mesh: dist.DeviceMesh) -> None:
    """Collective. Cut blocks and embedding over the ranks of ``mesh``; between blocks, cut the sequence.

    Each rank splits its slice of ``qkv`` into queries, keys and values. So the cut model computes something else than
    the whole one, with equal sizes.
    """
    sequence, whole = Shard(1), Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
    }
    for number in range(len(model.blocks)):
        at = f"blocks.{number}."
        plan |= {at + name: SequenceParallel() for name in ("norm_attention", "norm_mlp")}
        plan |= {at + name: ColwiseParallel(input_layouts=sequence) for name in ("attention.qkv", "up")}
        plan |= {at + name: RowwiseParallel(output_layouts=sequence) for name in ("attention.out", "down")}
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embedding.weight


def run(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else NUMELS[device.type]
    names = in_order(request.contenders or NAMES, FSDP2, FSDP2_ZERO2)
    tasks = [
        MeshTask(**vars(make_task(numel, dtype, count, device)), topology=topology)
        for count in tokens_of(request, device)
        for topology in TOPOLOGIES
    ]
    contests = [
        replace(contest(task, names, count), op=task.topology.name)
        for count in request.ranks or (RANKS,)
        for task in tasks
    ]
    return hold_all(contests, request.rounds or ROUNDS, say)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script(NAME, ABOUT, MENU, alone={NAME: run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
