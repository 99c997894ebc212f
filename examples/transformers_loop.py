"""A Hugging Face model in a loop of one's own: schedule, accumulation, clipping, save and resume.

python examples/transformers_loop.py [--model llama] [--stage 3] [--checkpoint DIR]
torchrun --standalone --nproc-per-node 2 examples/transformers_loop.py

Called again with the same --checkpoint and more --steps, it goes on where it stopped, on as many ranks as you like; on
as many as before, to the same bits.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, get_scheduler
from zero_optim import checkpoint

MICRO_BATCHES = 2
BLOCKS = ("GPT2Block", "LlamaDecoderLayer")  # at stage 3 these are gathered one at a time
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # what torchrun says, and what it is without


def build_model(name: str) -> PreTrainedModel:
    """A tiny model with random weights. GPT-2 ties its embedding to its head; Llama here does not."""
    torch.manual_seed(0)
    if name == "llama":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=32, **sizes))
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, **sizes))


def draw(step: int, micro: int, rank: int, device: torch.device) -> Tensor:
    """Tokens [4, 32] that count upwards from random ones: other ones for each step, micro-batch and rank."""
    generator = torch.Generator().manual_seed((step * MICRO_BATCHES + micro) * 1000 + rank)
    starts = torch.randint(128, (4, 1), generator=generator)
    return ((starts + torch.arange(32)) % 128).to(device)


def main(argv: list[str] | None = None) -> PreTrainedModel:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--checkpoint", type=Path, help="a folder: resumed from if there is one, written at the end")
    arguments = parser.parse_args(argv)

    rank, ranks, local_rank = (int(os.environ.get(name, default)) for name, default in PLACE.items())
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = build_model(arguments.model).to(device).train()
    if arguments.stage == 3:
        zero_optim.shard_module(model, units=BLOCKS)
    optimizer = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, stage=arguments.stage)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=5, num_training_steps=1000)

    first, folder = 0, arguments.checkpoint
    if folder and checkpoint.latest(folder):  # random states, too: dropout goes on as it would have
        first = checkpoint.load(folder, model, optimizer, scheduler=schedule).step

    for step in range(first, arguments.steps):
        for micro in range(MICRO_BATCHES):
            tokens = draw(step, micro, rank, device)
            with nullcontext() if micro == MICRO_BATCHES - 1 else optimizer.no_sync():
                loss = model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES
                loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)  # not torch.nn.utils.clip_grad_norm_: gradients are sharded
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {loss.item() * MICRO_BATCHES:.4f}  norm {norm.item():.3f}", flush=True)

    if folder:
        checkpoint.save(folder, model, optimizer, scheduler=schedule, step=arguments.steps, keep_last=1)
    optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
