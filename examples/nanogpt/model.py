"""A small GPT over bytes, and its batches: what before.py and after.py both train."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Called with tokens [batch, window] and the next ones, it gives the mean loss, [] fp32."""

    def __init__(self, window: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1).float(), targets.flatten())

    def groups(self, weight_decay: float) -> list[dict]:
        """Matrices decay, gains do not."""
        matrices = [weight for weight in self.parameters() if weight.ndim >= 2]
        gains = [weight for weight in self.parameters() if weight.ndim < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]


class Text:
    """The bytes of a file; the last tenth is held out."""

    def __init__(self, file: Path, window: int, batch: int, device: torch.device) -> None:
        data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        held_out = len(data) // 10
        self.parts = {"train": data[:-held_out], "held out": data[-held_out:]}
        self.window, self.batch, self.device = window, batch, device

    def draw(self, part: str) -> tuple[Tensor, Tensor]:
        """Tokens [batch, window] and the next ones, int64."""
        data = self.parts[part]
        starts = torch.randint(len(data) - self.window, (self.batch, 1))
        windows = data[starts + torch.arange(self.window + 1)].long().to(self.device)
        return windows[:, :-1], windows[:, 1:]
