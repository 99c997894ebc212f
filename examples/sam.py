"""Sharpness-aware minimization (SAM, Foret et al., 2021) around a sharded optimizer, at stages 0 to 2.

python examples/sam.py [--steps 60]
torchrun --standalone --nproc-per-node 2 examples/sam.py

Each rank climbs along the gradient of its own batch, as in the paper (m-sharpness), so the ascent communicates nothing.
At stage 3 no rank has all weights to move: ``climb`` raises ShardAccessError.
"""

import argparse
import os

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.nn import functional as F


def draw(step: int, rank: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Points [count, 16], and as the class the largest of their first four coordinates."""
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :4].argmax(1)


@torch.no_grad()
def climb(model: nn.Module, rho: float) -> list[tuple[nn.Parameter, Tensor]]:
    """Move the weights by ``rho`` along their gradients, and drop these. Returns the weights as they were."""
    trained = [p for p in model.parameters() if p.grad is not None]
    before = [(p, p.detach().clone()) for p in trained]
    norm = nn.utils.get_total_norm([p.grad for p in trained]).clamp(min=1e-12)
    for p in trained:
        p.add_(p.grad * (rho / norm))
        p.grad = None
    return before


def train_step(model: nn.Module, opt: zero_optim.ShardedAdamW, x: Tensor, classes: Tensor, rho: float) -> Tensor:
    """The loss before the step."""
    with opt.no_sync():  # gradients stay whole and local
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
    before = climb(model, rho)
    F.cross_entropy(model(x), classes).backward()  # reduced over the ranks
    with torch.no_grad():
        for parameter, value in before:
            parameter.copy_(value)  # bit for bit, so that fp32 masters stay as they are
    opt.step()
    opt.zero_grad()
    return loss.detach()


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stage", type=int, default=2, choices=range(3))
    parser.add_argument("--rho", type=float, default=0.05)
    arguments = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    opt = zero_optim.ShardedAdamW(model, lr=1e-2, stage=arguments.stage)

    for step in range(arguments.steps):
        loss = train_step(model, opt, *draw(step, rank), arguments.rho)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}")

    opt.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
