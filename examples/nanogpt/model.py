"""What before.py and after.py both have: a small GPT over bytes, its batches, flags and the schedule."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def parse(argv: list[str] | None, about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("model.py"), help="a text; model.py")
    parser.add_argument("--out", type=Path, help="a folder for ckpt.pt")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/ckpt.pt")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the computation; weights are fp32")
    parser.add_argument("--steps", type=int, default=100, help="where the schedule ends")
    parser.add_argument("--stop", type=int, help="stop after this step; the last one")
    parser.add_argument("--eval-interval", type=int, default=25)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches a step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--clip", type=float, default=1.0, help="of the norm of the gradients; 0: do not")
    for name, size in {"layers": 2, "width": 64, "heads": 2, "window": 64, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(argv)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Up in a straight line for a tenth of the steps, then down to a tenth of it along a cosine."""
    warmup = args.steps // 10
    if step < warmup:
        return args.lr * (step + 1) / (warmup + 1)
    way = min(1.0, (step - warmup) / max(1, args.steps - warmup))
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * way)))


def start() -> tuple[int, int, torch.device]:
    """This rank, the number of ranks, and the device: what torchrun has started, else one rank."""
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, int(os.environ.get("WORLD_SIZE", "1")), device
