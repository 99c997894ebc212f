"""A ``torch.compile``d model with a sharded optimizer: schedule, clipping, save and resume.

python examples/compile_model.py [--backend aot_eager] [--checkpoint DIR]
torchrun --standalone --nproc-per-node 2 examples/compile_model.py

Called again with the same --checkpoint and more --steps, it goes on where it stopped, on as many ranks as you like.
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


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def draw(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs [8, 16] and classes [8], other ones for each step and rank."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return x, x[:, :4].argmax(1)


def main(argv: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="torch.compile's; inductor needs a C++ compiler")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, help="a folder: resumed from if there is one, written at the end")
    arguments = parser.parse_args(argv)

    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = build_model().to(device)
    compiled = torch.compile(model, backend=arguments.backend)
    optimizer = zero_optim.ShardedAdamW(compiled, lr=1e-2, stage=arguments.stage)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=1000)

    first = 0
    if arguments.checkpoint and checkpoint.latest(arguments.checkpoint):
        first = checkpoint.load(arguments.checkpoint, model, optimizer, scheduler=schedule).step

    for step in range(first, arguments.steps):
        x, y = (tensor.to(device) for tensor in draw(step, rank))
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    if arguments.checkpoint:
        checkpoint.save(arguments.checkpoint, model, optimizer, scheduler=schedule, step=arguments.steps, keep_last=1)
    optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
