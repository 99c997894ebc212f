"""The small model that programs train: blocks that a rank may leave out, of any dtypes, which can be made to raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from programs.world import Planned, boom
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=norm_dtype)
        self.gain = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor, with_gain: bool) -> Tensor:
        y = self.linear(self.norm(x.to(self.norm.weight.dtype)).to(self.linear.weight.dtype))
        return x + (y * self.gain if with_gain else y).tanh().to(x.dtype)


class Model(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, dtypes = config["width"], [DTYPES[name] for name in config["dtypes"]]
        norm = config.get("norm_dtype")
        self.recompute = config.get("recompute")
        self.first = nn.Linear(width, width, dtype=dtypes[0])
        self.blocks = nn.ModuleList(Block(width, t, DTYPES[norm] if norm else t) for t in dtypes[1:-1])
        if config.get("tied") and dtypes[1] == dtypes[-2]:
            self.blocks[-1].linear.weight = self.blocks[0].linear.weight
        self.head = nn.Linear(width, width, dtype=dtypes[-1])
        self.spare = nn.Parameter(torch.ones(5, dtype=dtypes[0]))  # no forward uses it
        if config.get("odd"):
            self.scale, self.empty = nn.Parameter(torch.ones((), dtype=dtypes[0])), nn.Parameter(torch.ones(0, 3))

    def add_extra(self) -> nn.Module:
        """A layer that is there, and used, from now on."""
        generator = torch.Generator().manual_seed(5)
        self.extra = nn.Linear(self.head.in_features, self.head.in_features, dtype=self.head.weight.dtype)
        with torch.no_grad():
            for parameter in self.extra.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        return self.extra

    def forward(self, x: Tensor, use: Sequence[int], bomb: Any = None, fail: Any = None) -> Tensor:
        """``bomb`` and ``fail``: where backward, or this forward, raises: a block, or "first" in backward."""
        x = self.first(x.to(self.first.weight.dtype))
        if hasattr(self, "scale"):
            x = x * self.scale + self.empty.sum().to(x.dtype)
        for number, (block, used) in enumerate(zip(self.blocks, use, strict=True)):
            if fail == number:
                raise Planned
            if used and self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, used == 2, use_reentrant=self.recompute == "reentrant")
            elif used:
                x = block(x, used == 2)
            if bomb == number:
                x = boom(x)
        x = self.head(x.to(self.head.weight.dtype))
        if hasattr(self, "extra"):
            x = x + self.extra(x)
        if fail == "first":
            raise Planned
        return boom(x) if bomb == "first" else x
