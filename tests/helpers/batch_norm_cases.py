"""Batch norm over the batches of all ranks, trained on ranks and in one process: what tests on the CPU and a GPU share.

torch's SyncBatchNorm runs on GPUs alone. On the CPU a stand-in does what it does, forward and backward, with as many
collectives: its statistics are reduced over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

LR, STEPS, ROWS = 1e-2, 5, 6


class SyncBatchNormOfHost(nn.SyncBatchNorm):
    """Inputs [rows, features, pixels], as many rows on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        count = dist.get_world_size() * x.shape[0] * x.shape[2]
        mean = all_reduce(x.sum((0, 2))) / count
        centred = x - mean[:, None]
        variance = all_reduce(centred.square().sum((0, 2))) / count
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.detach(), self.momentum)
        self.running_var.lerp_(variance.detach() * count / (count - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return centred * scale[:, None] + self.bias[:, None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1, bias=False), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(self.conv(x)))


def make_model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, width, 1), Block(width), Block(width), nn.Flatten(), nn.Linear(width * 5, 4))


def over_ranks(model: nn.Module) -> nn.Module:
    """Converted by torch; what cannot run on the CPU is stood in for there."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and not next(module.parameters()).is_cuda:
            module.__class__ = SyncBatchNormOfHost
    return model


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """[ROWS, 3, 5] and classes [ROWS]; ranks' inputs have means and deviations of their own."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(ROWS, 3, 5, generator=generator) * (rank + 1) + rank
    return x, torch.randint(4, (ROWS,), generator=generator)


def train_on_ranks(rank: int, world_size: int, stage: int, device: str, eps: float) -> tuple[list[Tensor], ...]:
    """Weights and buffers, on the CPU, of SyncBatchNorm at ``stage``."""
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    model = over_ranks(make_model().to(device))
    if stage == 3:
        zero_optim.shard_module(model, (Block,))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=LR, eps=eps, stage=None if stage == 3 else stage)
    for step in range(STEPS):
        x, y = (tensor.to(device) for tensor in batch(rank, step))
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    with zero_optim.gather_parameters(model):
        weights = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    opt.close()
    return weights, [buffer.cpu().clone() for buffer in model.buffers()]


def train_in_one_process(world_size: int, eps: float) -> tuple[list[Tensor], ...]:
    """The same of ``torch.optim.AdamW`` and plain batch norm, on the batches of all ranks together."""
    model: Any = make_model()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, eps=eps)
    for step in range(STEPS):
        parts = [batch(rank, step) for rank in range(world_size)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], list(model.buffers())
