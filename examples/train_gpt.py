"""A sharded training loop to copy: a byte-level GPT on the text of the files named, or on this one.

python examples/train_gpt.py [FILE ...]
torchrun --standalone --nproc-per-node 2 examples/train_gpt.py [FILE ...]

--optimizer muon updates the matrices of blocks by Muon, and the rest by AdamW, in one optimizer.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.nn import functional as F
from zero_optim import rules

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
    def __init__(self, layers: int = 2, hidden: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(WINDOW, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def draw(text: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.randint(text.numel() - WINDOW, (BATCH, 1))
    windows = text[starts + torch.arange(WINDOW + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[Path(__file__)])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    arguments = parser.parse_args()

    # The ranks, where torchrun has started several; one rank needs none of this.
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in arguments.files)), dtype=torch.uint8)
    model = GPT().to(device, torch.bfloat16)  # rank 0's weights go to all ranks when the optimizer is made
    groups = [{"params": list(model.named_parameters())}]
    if arguments.optimizer == "muon":
        matrices, others = zero_optim.ShardedMuon.split(model)
        groups = [{"params": others}, {"params": matrices, "rule": rules.Muon(lr=0.02)}]
    optimizer = zero_optim.ShardedAdamW(groups, lr=1e-3, weight_decay=0.1, stage=arguments.stage)
    optimizer.attach(model)  # then all-gathers overlap the next forward
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    torch.manual_seed(rank)  # each rank draws its own windows

    for step in range(1, arguments.steps + 1):
        inputs, targets = draw(text, device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()  # gradients are averaged over the ranks meanwhile, each rank keeping its shard
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and (step % 20 == 0 or step == arguments.steps):
            print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.3f}", flush=True)

    if rank == 0:
        held = ", ".join(f"{kind} {size:,}" for kind, size in optimizer.stats()["memory"].items())
        print(f"bytes on rank 0: {held}")
    optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
