"""A byte-level GPT: pre-norm blocks, rotary positions, causal attention, tied embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a :class:`GPT`. ``seq`` is the longest window that it attends to, in bytes."""

    layers: int = 3
    hidden: int = 192
    heads: int = 3
    seq: int = 256


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair ``(x[i], x[i + head_dim / 2])`` of ``x`` ``[..., seq, head_dim]`` by its position's angle."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cos, sin)
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


class GPT(nn.Module):
    """``forward(tokens [batch, seq] int64) -> logits [batch, seq, 256]`` in the parameters' dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCAB, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        # Normal of std 1/sqrt(fan-in); what adds to the residual stream is scaled by 1/sqrt(2 layers), as in GPT-2.
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                std = 0.02 if "embedding" in name else parameter.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")):
                    std /= math.sqrt(2 * config.layers)
                nn.init.normal_(parameter, 0.0, std)
        self.to(dtype)
        # Cosines and signed sines of RoPE (Su et al., 2021, eq. 34), [seq, head_dim] each.
        half = config.hidden // config.heads // 2
        frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config.seq, dtype=torch.float64), frequency)
        cos, sin = angle.cos(), angle.sin()
        self.register_buffer("rotary_cos", torch.cat((cos, cos), -1).to(dtype), persistent=False)
        self.register_buffer("rotary_sin", torch.cat((-sin, sin), -1).to(dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        cos, sin = self.get_buffer("rotary_cos")[:seq], self.get_buffer("rotary_sin")[:seq]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy (fp32 scalar, nats per byte) of ``windows`` ``[batch, seq + 1]`` int64."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, *, seed: int, temperature: float = 0.8) -> Tensor:
    """Sample ``count`` bytes after ``prompt`` ``[n]`` int64. Returns both, ``[n + count]`` int64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt.tolist()
    device = model.head.weight.device
    for _ in range(count):
        window = torch.tensor([tokens[-model.config.seq :]], device=device)
        logits = model(window)[0, -1].float().cpu() / temperature
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return torch.tensor(tokens)
