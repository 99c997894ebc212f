"""Tensor parallelism and ZeRO: weights are cut over two ranks, and state is sharded over the ranks with the same cut.

torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py [--stage 3] [--save FOLDER]

docs/parallelism.md has the other topologies: replicas, plain slices as in Megatron-LM, experts, pipelines.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from zero_optim import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--save", type=Path, help="a folder for a checkpoint, which loads on any other mesh")
    arguments = parser.parse_args(argv)
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)  # the same weights on all ranks, before they are cut
    model = nn.Sequential(*(Block(64) for _ in range(2)), nn.Linear(64, 4)).to(device)
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if arguments.stage == 3:
        zero_optim.shard_module(model, units=(Block,), mesh=mesh["dp"])
    stage = None if arguments.stage == 3 else arguments.stage  # a sharded model says so itself
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=3e-3, stage=stage, mesh=mesh["dp"])

    for step in range(arguments.steps):
        # Ranks that have slices of one weight have the same batch; data-parallel ranks have their own.
        generator = torch.Generator().manual_seed(1000 * step + mesh["dp"].get_local_rank())
        x = torch.randn(16, 64, generator=generator).to(device)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        norm = opt.clip_grad_norm_(1.0)  # of whole gradients: a slice counts once, and so does a replica
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.3f}", flush=True)

    if arguments.save:
        checkpoint.save(arguments.save, model, opt, step=arguments.steps)
    opt.close()
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
