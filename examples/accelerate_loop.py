"""Hugging Face ``accelerate`` with a sharded optimizer: schedule, accumulation, clipping, save and resume.

python examples/accelerate_loop.py [--stage 3] [--checkpoint DIR]
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py  # on CPUs too

Called again with the same --checkpoint and more --steps, it goes on where it stopped, on as many ranks as you like.
"""

import argparse
from pathlib import Path

import torch
import zero_optim
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from zero_optim.integrations.accelerate import prepare

MICRO_BATCHES = 2


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def draw(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [8, 16] and classes [8], other ones for each micro-batch and rank."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return x, x[:, :4].argmax(1)


def main(argv: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--checkpoint", type=Path, help="a folder: resumed from if there is one, written at the end")
    arguments = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=not torch.cuda.is_available())
    model = build_model().to(accelerator.device)  # in its place before the optimizer is made
    if arguments.stage == 3:
        zero_optim.shard_module(model, units=(nn.Linear,))  # what is gathered at a time
    plain = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2, stage=arguments.stage)
    model, optimizer = prepare(accelerator, model, plain)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: min(1.0, (step + 1) / 10))
    accelerator.register_for_checkpointing(schedule)  # prepared, it would step once a rank

    if arguments.checkpoint and arguments.checkpoint.exists():  # random states, too, and accelerator.step
        accelerator.load_state(arguments.checkpoint)

    for step in range(accelerator.step, arguments.steps * MICRO_BATCHES):
        x, y = (tensor.to(accelerator.device) for tensor in draw(step, accelerator.process_index))
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
        if (step + 1) % 20 == 0:
            accelerator.print(f"micro-batch {step + 1}  loss {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.4f}")

    if arguments.checkpoint:
        accelerator.save_state(arguments.checkpoint)  # on every rank
    accelerator.end_training()
    return model


if __name__ == "__main__":
    main()
