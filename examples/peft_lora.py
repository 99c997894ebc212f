"""LoRA by ``peft`` on a sharded base: a bf16 or NF4 base at stage 3, fp32 adapters, adapters saved, then merged.

python examples/peft_lora.py [--nf4] [--output DIR]
torchrun --standalone --nproc-per-node 2 examples/peft_lora.py

DIR/adapter is what ``peft`` loads on the base; DIR/merged, without --nf4, is a model for ``from_pretrained``.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import zero_optim
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

PLACE = {"RANK": "0", "LOCAL_RANK": "0"}  # what torchrun says, and what it is without


def build_base(nf4: bool = False) -> PreTrainedModel:
    """A tiny model with random weights, in bf16. ``nf4``: its matrices in four bits, but for embedding and head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes)).to(torch.bfloat16)
    if nf4:
        for layer in base.model.layers:
            for module in (layer.self_attn, layer.mlp):
                for name, linear in list(module.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(module, name, in_four_bits(linear))
    return base


def in_four_bits(linear: nn.Linear) -> nn.Module:
    """What ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)`` loads. Bytes that are
    stored as bf16 are sharded as bf16 is."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"quant_type": "nf4", "quant_storage": torch.bfloat16}
    quantised = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, **options)
    quantised.weight = Params4bit(linear.weight.data, requires_grad=False, module=quantised, **options)
    return quantised.to(linear.weight.device)  # moving it quantises it


def add_adapters(base: PreTrainedModel) -> PeftModel:
    """The base frozen. ``peft`` makes adapters of a 16-bit base in fp32."""
    base.requires_grad_(False)
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def draw(step: int, rank: int, device: torch.device) -> Tensor:
    """Tokens [4, 32] that count upwards from random ones: other ones for each step and rank."""
    starts = torch.randint(128, (4, 1), generator=torch.Generator().manual_seed(step * 1000 + rank))
    return ((starts + torch.arange(32)) % 128).to(device)


def main(argv: list[str] | None = None) -> tuple[dict[str, Tensor], PreTrainedModel]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--nf4", action="store_true", help="a base in four bits; needs bitsandbytes")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "peft_lora"))
    arguments = parser.parse_args(argv)

    rank, local_rank = (int(os.environ.get(name, default)) for name, default in PLACE.items())
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = add_adapters(build_base(arguments.nf4).to(device))
    if arguments.stage == 3:
        zero_optim.shard_module(model, units=("LlamaDecoderLayer",))  # the frozen base, too
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = zero_optim.ShardedAdamW(trained, lr=1e-2, stage=arguments.stage)

    for step in range(arguments.steps):
        tokens = draw(step, rank, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)
    optimizer.close()

    # On every rank: at stage 3 each token gathers the model.
    tokens = model.generate(input_ids=draw(0, rank, device)[:1, :4], max_new_tokens=8, do_sample=False)
    if rank == 0:
        print(f"generated {tokens[0].tolist()}", flush=True)

    adapter = zero_optim.full_model_state_dict(model, trained_only=True)  # on rank 0; the base is not gathered
    if rank == 0:
        model.save_pretrained(arguments.output / "adapter", state_dict=adapter)

    if not arguments.nf4:  # a base in four bits would be rounded again
        with torch.no_grad(), zero_optim.gather_parameters(model, writeback=True):
            merged = model.merge_and_unload()  # sharded as before, without the adapters
        whole = zero_optim.full_model_state_dict(merged)
        if rank == 0:
            merged.save_pretrained(arguments.output / "merged", state_dict=whole)
        model = merged
    if dist.is_initialized():
        dist.destroy_process_group()
    return adapter, model


if __name__ == "__main__":
    main()
