"""A model of plain slices with Megatron's marks, on any number of tensor-parallel ranks, and the same on one.

Each block is a gated MLP. Its first weight is fused: a slice has rows of the gate, and then rows of what it gates. So
slices put one after another are not the whole. Between blocks each tensor-parallel rank has a part of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, LENGTH, BATCH = 12, 8, 4, 3
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


class Gather(torch.autograd.Function):
    """The whole sequence of the parts that ranks have; backward adds up gradients, and gives each its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return part_of(summed(grad, ctx.group), ctx.group), None


class Sum(torch.autograd.Function):
    """This rank's part of the sum of what ranks have of the whole sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return part_of(summed(x, group), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class Part(torch.autograd.Function):
    """This rank's part of a sequence that all of them have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return part_of(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


def gathered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x.clone()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.clone()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def part_of(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return x.clone() if group is None else x.chunk(group.size())[group.rank()].contiguous()


class Block(nn.Module):
    """``norm`` and ``bias`` are copies whose gradients are terms; ``fused``, ``inner`` and ``down`` are slices."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        own = HIDDEN // (1 if group is None else group.size())
        self.norm = nn.Parameter(torch.empty(WIDTH))
        self.fused = nn.Parameter(torch.empty(2 * own, WIDTH))
        self.inner = nn.Parameter(torch.empty(2 * own))
        self.down = nn.Parameter(torch.empty(WIDTH, own))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[part of the sequence, batch, width]"""
        h = Gather.apply(F.layer_norm(x, (WIDTH,)) * self.norm, self.group)
        gate, up = F.linear(h, self.fused, self.inner).chunk(2, -1)
        return x + Sum.apply(F.linear(F.silu(gate) * up, self.down), self.group) + self.bias


class Model(nn.Module):
    """``gain`` is a copy of which every rank has the whole gradient. It has no mark."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))

    def forward(self, x: Tensor, use: Sequence[int] = (0, 1)) -> Tensor:
        """x: [sequence, batch, width]. This rank's part of what comes out. ``use``: numbers of the blocks that are."""
        x = Part.apply(x * self.gain, self.group)
        for number in use:
            x = self.blocks[number](x)
        return x


def mark(model: nn.Module) -> None:
    """As Megatron does."""
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if last in ("fused", "inner", "down"):
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = (1 if last == "down" else 0), 1
        elif last in ("norm", "bias"):
            parameter.tensor_model_parallel, parameter.sequence_parallel = False, True


def slice_of(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """What one of so many tensor-parallel ranks has of a parameter."""
    last = name.rpartition(".")[2]
    if last == "down":
        return whole.chunk(ranks, 1)[rank]
    if last in ("fused", "inner"):
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    return whole


def make_model(group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """``group``: the tensor-parallel ranks; None: one, and whole parameters."""
    generator = torch.Generator().manual_seed(seed)
    whole, model = Model(None), Model(group)
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    with torch.no_grad():
        for (name, parameter), own in zip(whole.named_parameters(), model.parameters(), strict=True):
            values = torch.randn(parameter.shape, generator=generator) * 0.5
            own.copy_(slice_of(name, values, rank, ranks))
    model.to(dtype)
    mark(model)
    return model


def batch(data_rank: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((data_rank * 100 + step) * 10 + micro)
    x, y = torch.randn(2, LENGTH, BATCH, WIDTH, generator=generator)
    return x, y


def loss_of(model: Model, data_rank: int, step: int, micro: int = 0, use: Sequence[int] = (0, 1)) -> Tensor:
    """The term of this rank, of the loss of a data-parallel rank: that of its part of the sequence."""
    x, y = batch(data_rank, step, micro)
    out = model(x.to(model.gain.dtype), use)
    return (out.float() - part_of(y, model.group)).square().sum() / y.numel()
