"""Stage 3, a training loop to copy: parameters, gradients and optimizer state are sharded over the ranks.

python examples/train_sharded.py [FILE ...]
torchrun --standalone --nproc-per-node 2 examples/train_sharded.py [FILE ...] [--save FOLDER] [--resume FOLDER]

A byte-level GPT on the text of the files named, or on this one. docs/zero3.md explains each call.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.nn import functional as F
from zero_optim import checkpoint

WINDOW, BATCH = 128, 8


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class GPT(nn.Module):
    def __init__(self, layers: int = 4, hidden: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(WINDOW, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, text: Tensor, device: torch.device) -> Tensor:
    """The mean loss on a batch of windows drawn from ``text``."""
    starts = torch.randint(text.numel() - WINDOW, (BATCH, 1))
    windows = text[starts + torch.arange(WINDOW + 1)].long().to(device)
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, device: torch.device, batches: int = 4) -> float:
    """The mean loss of all ranks. Each makes as many forwards: they gather parameters from one another."""
    model.eval()
    total = sum(loss_of(model, text, device) for _ in range(batches)) / batches
    model.train()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[Path(__file__)])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="a folder to write a checkpoint into, in the end")
    parser.add_argument("--resume", type=Path, help="such a folder to go on from, on as many ranks as you like")
    arguments = parser.parse_args()

    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    with torch.device("meta"):  # no memory yet
        model = GPT().to(torch.bfloat16)
    # Block after block gets memory and values (by reset_parameters, or init_fn=), and keeps this rank's shard.
    zero_optim.shard_module(model, units=(Block,), device=device)
    optimizer = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1)
    done = 0
    if arguments.resume:
        done = checkpoint.load(arguments.resume, model, optimizer).step  # each rank reads its shard

    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in arguments.files)), dtype=torch.uint8)
    text, held_out = data.split([len(data) - len(data) // 10, len(data) // 10])
    torch.manual_seed(rank + 1000 * done)  # each rank draws its own windows, and a resumed run new ones

    for step in range(done + 1, arguments.steps + 1):
        loss = loss_of(model, text, device)  # a block's parameters are gathered as it runs, then dropped
        loss.backward()  # gathered again; gradients are averaged, each rank keeping its shard
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()  # each rank updates its shard; nothing is sent
        optimizer.zero_grad()
        if rank == 0 and (step % 20 == 0 or step == arguments.steps):
            print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.3f}", flush=True)

    held_out_loss = evaluate(model, held_out, device)
    if arguments.save:
        checkpoint.save(arguments.save, model, optimizer, step=arguments.steps)  # each rank writes its shard
    if rank == 0:
        held = ", ".join(f"{kind} {size:,}" for kind, size in optimizer.stats()["memory"].items())
        print(f"held-out loss {held_out_loss:.4f}")
        print(f"bytes on rank 0: {held}")
    optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
