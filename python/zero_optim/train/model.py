"""A byte-level GPT (pre-norm blocks, rotary positions, causal attention, tied embeddings), and the configuration of a
run: from the flags, or from the checkpoint that it resumes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UsageError
from ..stores.offload import read_offload, read_param_offload

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


# -- the configuration of a run ----------------------------------------------------------------------------------------

# Smaller defaults: on a CPU fp16 matrix products are ~60 times slower than bf16 ones (seen on 2 cores with AMX).
_FP16_ON_CPU = {"layers": 2, "hidden": 128, "heads": 2, "seq": 128, "batch": 4, "steps": 400, "lr": 2e-3}
# bf16 is emulated there, at a third of the speed of fp32 or less. Fewer windows: two minutes on two slow cores.
_FP32_ON_CPU = {"dtype": "fp32", "batch": 2, "steps": 250}

Flags = Mapping[str, Any]  # the fields of ``TrainConfig`` that the command line gives
RESUME_AUTO = Path("auto")
# A resumed run takes these from its checkpoint.
_FIXED_ON_RESUME = [field.name for field in fields(ModelConfig)]
_FIXED_ON_RESUME += ["optimizer", "lr", "muon_lr", "warmup", "weight_decay", "clip", "seed"]


@dataclass(frozen=True)
class TrainConfig(ModelConfig):
    """One training run, a field for each flag. The defaults: two minutes on two CPU cores with bf16 units."""

    stage: int = 2
    dtype: str = "bf16"
    batch: int = 4
    accumulate: int = 1
    steps: int = 500
    optimizer: str = "adamw"
    lr: float = 4e-3
    muon_lr: float = 0.02
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    device: str = "cpu"
    data: str | None = None
    out: str | None = None
    save_every: int = 0
    keep_last: int = 0
    checkpoint: bool = True
    state_offload: str | None = None
    device_budget: str | None = None
    param_offload: str | None = None
    master: str | None = None
    state_dtype: str = "fp32"
    telemetry_every: int | None = None


def given_flags(arguments: argparse.Namespace) -> Flags:
    """Collect the flags that were given. Raises UsageError."""
    values = {field.name: getattr(arguments, field.name) for field in fields(TrainConfig)}
    given = {name: value for name, value in values.items() if value is not None}
    if arguments.resume == RESUME_AUTO and "out" not in given:
        raise UsageError("--resume auto: looks for checkpoints in --out, which is not given")
    return given


def fresh_config(given: Flags, device: str) -> TrainConfig:
    """Make the configuration of a fresh run on ``device`` ("cpu" or "cuda"). Raises UsageError."""
    defaults: dict[str, Any] = {}
    needs_bf16 = given.get("master") in ("split", "split8")
    dtype = given.get("dtype", "bf16" if needs_bf16 else None)
    if dtype is None and not has_bf16_units(device):
        defaults = _FP32_ON_CPU if device == "cpu" else {"dtype": "fp32"}
    elif dtype == "fp16" and device == "cpu":
        defaults = _FP16_ON_CPU
    return _checked(TrainConfig(**{**defaults, **given, "device": device}))


def has_bf16_units(device: str) -> bool:
    """Return whether the hardware has instructions for bf16 products, as AVX512-BF16, AMX and Ampere have."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10 has none
    return any(there is True and "bf16" in name for name, there in capabilities.items())


def resumed_config(saved: Mapping[str, Any], given: Flags, device: str) -> TrainConfig:
    """Make the saved run's configuration, with the flags that a resumed run may change. Any other raises UsageError."""
    for name in _FIXED_ON_RESUME:
        if given.get(name, saved[name]) != saved[name]:
            flag = "--" + name.replace("_", "-")
            made = f"the checkpoint was made with {flag} {saved[name]}"
            raise UsageError(f"{flag} {given[name]}: {made}; leave the flag out to resume")
    return _checked(TrainConfig(**{**saved, **given, "device": device}))


def _checked(config: TrainConfig) -> TrainConfig:
    """Return the configuration. Raises UsageError for flags that do not go together."""
    try:
        read_offload(config.state_offload, config.device_budget)
        read_param_offload(config.param_offload)
    except ValueError as error:
        raise UsageError(f"--state-offload, --device-budget, --param-offload: {error}") from error
    if config.param_offload is not None and config.stage < 3:
        raise UsageError(f"--param-offload {config.param_offload}: needs --stage 3, which shards parameters")
    if config.hidden % (2 * config.heads):
        sizes = f"--hidden {config.hidden}, --heads {config.heads}"
        raise UsageError(f"{sizes}: --hidden must be a multiple of twice --heads, as rotary positions turn pairs")
    return config
