"""``two_hosts_program.py FOLDER STEPS``: training of a rank that saves after each step, and goes on from FOLDER."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import zero_optim
from torch import nn
from zero_optim import checkpoint


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2)
    done = checkpoint.load(folder, model, opt).step if any(folder.glob("step-*")) else 0
    print(f"from step {done}", flush=True)
    for step in range(done + 1, steps + 1):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()
        checkpoint.save(folder, model, opt, step=step, keep_last=2)
        print(f"step {step}", flush=True)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"weights {weights.numpy().tobytes().hex()}", flush=True)
    opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
