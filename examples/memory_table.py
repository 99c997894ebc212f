"""ZeRO's memory table, by the paper's formula and by counting real shards.

torchrun --standalone --nproc-per-node 2 examples/memory_table.py

For each stage: the bytes that a rank holds for each bf16 parameter, after a step whose gradients are still there. The
paper counts 16 bytes: 2 for the parameter, 2 for its gradient, and 12 of state in fp32 (master, exp_avg, exp_avg_sq),
as ``master="fp32"`` has them. By default the parameter is the upper half of its master, which takes 2 bytes less.
"""

import os

import torch
import torch.distributed as dist
import zero_optim
from torch import nn

STATE = {"fp32": 12, "split": 10}  # bytes of a master and two moments beside a bf16 parameter


class Block(nn.Linear):
    """What stage 3 gathers at a time."""


def formula(stage: int, master: str, ranks: int) -> float:
    """Bytes per parameter: what is sharded is divided by the number of ranks."""
    parameter, gradient, state = 2.0, 2.0, float(STATE[master])
    return (
        parameter / (ranks if stage >= 3 else 1)
        + gradient / (ranks if stage >= 2 else 1)
        + state / (ranks if stage >= 1 else 1)
    )


def counted(stage: int, master: str, layers: int = 4, width: int = 256) -> float:
    """The same of a model that trains, by ``opt.stats()``; without communication buffers and one number a row."""
    model = nn.Sequential(*(Block(width, width, bias=False) for _ in range(layers))).to(torch.bfloat16)
    if stage == 3:
        zero_optim.shard_module(model, units=(Block,))
    opt = zero_optim.ShardedAdamW(model.parameters(), stage=None if stage == 3 else stage, master=master)
    for _ in range(2):
        opt.zero_grad()
        model(torch.ones(1, width, dtype=torch.bfloat16)).sum().backward()
        opt.step()
    memory = opt.stats()["memory"]
    kinds = "parameters", "gradients", "master", "master_low", "exp_avg", "exp_avg_sq"  # master_low: of a split one
    held = sum(memory.get(kind, 0) for kind in kinds)
    opt.close()
    return held / (layers * width * width)


def main() -> list[tuple[float, float]]:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rows = []
    for master in STATE:
        for stage in range(4):
            rows.append((formula(stage, master, ranks), counted(stage, master)))
            if rank == 0:
                by_formula, by_count = rows[-1]
                print(
                    f"master={master:5}  stage {stage}  N = {ranks}: formula {by_formula:6.3f}, counted {by_count:6.3f}"
                )
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
