"""Average over tokens: ranks have sequences of different lengths, and train as one process does on all of them.

python examples/packed_sequences.py
torchrun --standalone --nproc-per-node 2 examples/packed_sequences.py

Both print the same losses, to rounding. docs/averaging.md explains ``opt.count``.
"""

import argparse
import os

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, HIDDEN = 64, 32


def sequences(step: int) -> list[Tensor]:
    """Of all ranks together: packs of different lengths, in which the next token follows from the last."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 200, (8,), generator=generator).tolist()
    starts = torch.randint(0, VOCABULARY, (8,), generator=generator).tolist()
    return [(5 * torch.arange(length + 1) + start) % VOCABULARY for length, start in zip(lengths, starts, strict=True)]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2))
    options = parser.parse_args(arguments)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group(device_id=device if isinstance(device, torch.device) else None)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)).to(device)
    opt = zero_optim.ShardedAdamW(model, lr=0.02, stage=options.stage, max_grad_norm=1.0)
    losses = []
    for step in range(options.steps):
        total = torch.zeros(2, device=device)
        for pack in sequences(step)[rank::ranks]:
            pack = pack.to(device)
            with opt.no_sync():  # ``step`` reduces once: ranks may have different numbers of packs
                loss = F.cross_entropy(model(pack[:-1]), pack[1:], reduction="sum")
                loss.backward()
            opt.count(len(pack) - 1)
            total += torch.stack([loss.detach(), loss.new_tensor(len(pack) - 1)])
        opt.step()
        opt.zero_grad()
        if ranks > 1:  # for the page alone: training needs no such sum
            dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    opt.close()
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
