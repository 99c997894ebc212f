"""Muon for the matrices of hidden layers, AdamW for the rest, in one sharded optimizer.

python examples/muon.py [--steps 50]
torchrun --standalone --nproc-per-node 2 examples/muon.py

docs/muon.md says which parameters Muon takes, and what a step communicates.
"""

import argparse
import os

import torch
import torch.distributed as dist
import zero_optim
from torch import nn
from torch.nn import functional as F
from zero_optim import rules


class Classifier(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(256, width)
        self.hidden = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(tokens)))


def draw(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [32, 8] of one quarter of the vocabulary each, and as the class its number."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    classes = torch.randint(4, (32,), generator=generator)
    return 64 * classes[:, None] + torch.randint(64, (32, 8), generator=generator), classes


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = Classifier()
    matrices, others = zero_optim.ShardedMuon.split(model)  # others: embeddings, heads, norms, biases
    groups = [{"params": matrices, "lr": 0.02}, {"params": others, "rule": rules.AdamW(lr=3e-3)}]
    opt = zero_optim.ShardedMuon(groups, max_grad_norm=1.0)  # one norm over all of them

    for step in range(arguments.steps):
        tokens, classes = draw(step, rank)
        loss = F.cross_entropy(model(tokens), classes)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}")

    if rank == 0:
        held = ", ".join(f"{kind} {size:,}" for kind, size in opt.stats()["memory"].items() if size)
        print(f"Muon has {len(matrices)} matrices, AdamW {len(others)} other parameters; bytes on rank 0: {held}")
    opt.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
