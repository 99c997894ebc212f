"""A small GPT that torch's own styles cut over tensor-parallel ranks, and the same on one: for tests of every room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from simulated_gpu.switch import the_device
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, BATCH = 11, 16, 4, 24, 8, 2


class Block(nn.Module):
    """``hidden`` is 24, or 5 rows over two ranks where slices are to be uneven: then without sequence parallelism."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # The gradient of the keys' bias is zero but for rounding, of which Adam would make steps.
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (of(h) for of in (self.q, self.k, self.v))
        q, k, v = (of.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for of in (q, k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, use: Sequence[int] = (0, 1)) -> Tensor:
        """``use``: numbers of the blocks that are."""
        x = self.tokens(tokens)
        for number in use:
            x = self.blocks[number](x)
        return self.head(self.norm(x))


def make_mesh(data: int, tensor: int, device: str | None = None) -> dist.DeviceMesh:
    """Collective. All ranks of the test."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device or the_device().type, (data, tensor), mesh_dim_names=("dp", "tp"))


def cut(model: Gpt, mesh: dist.DeviceMesh, *, sequence: bool = True) -> Gpt:
    """Collective. Cut ``model`` over the one dimension of ``mesh``.

    ``sequence``: with sequence parallelism, and the loss over slices of the vocabulary; else norms are plain parameters
    beside DTensors.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    for number in range(len(model.blocks)):
        at = f"blocks.{number}"
        for name in ("q", "k", "v", "up"):
            # Slices of other sizes than torch would guess stay DTensors on their way to the next layer.
            plan[f"{at}.{name}"] = ColwiseParallel(input_layouts=between, use_local_output=name != "up")
        for name in ("out", "down"):
            plan[f"{at}.{name}"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan |= {f"{at}.norm1": SequenceParallel(), f"{at}.norm2": SequenceParallel()}
    if sequence:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    else:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def cut_stage(stage: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    """Collective. As ``cut`` with sequence parallelism, of a part of the model: what a stage of a pipeline sends to the
    next is a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
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


def batch(data_rank: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((data_rank * 100 + step) * 10 + micro)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, data_rank: int, step: int, micro: int = 0, use: Sequence[int] = (0, 1)) -> Tensor:
    x, y = (tokens.to(next(model.parameters()).device) for tokens in batch(data_rank, step, micro))
    out = model(x, use)
    return F.cross_entropy(out.flatten(0, 1).float(), y.flatten())


@contextlib.contextmanager
def losses(*, sequence: bool) -> Iterator[None]:
    """Within it, losses and their backwards take logits that are cut over the vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel() if sequence else contextlib.nullcontext():
        yield


@dataclass
class Way:
    """How the model is made, and at which stage it is trained. ``frozen``: parameters that need no gradient."""

    stage: int = 2
    dtype: torch.dtype = torch.float32
    sequence: bool = True
    hidden: int = HIDDEN
    frozen: tuple[str, ...] = ()


HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def make_model(way: Way, mesh: dist.DeviceMesh | None = None, seed: int = 0, device: str | None = None) -> Gpt:
    """``mesh``: that it is cut over."""
    torch.manual_seed(seed)
    model = Gpt(hidden=way.hidden).to(way.dtype)
    if device is not None:
        model.to(device)
    if mesh is not None:
        cut(model, mesh, sequence=way.sequence)
    for name in way.frozen:  # not before: torch's styles make new parameters
        model.get_parameter(name).requires_grad_(False)
    return model
