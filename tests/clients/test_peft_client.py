"""LoRA by ``peft``: a frozen base in bf16, in four and in eight bits, adapters in fp32, saved and merged."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import zero_optim
from cells import slow
from client_cases import (
    EPS,
    as_torchrun,
    assert_like_adamw,
    assert_ranks_alike,
    load_example,
    needs,
    replicate,
    run_client_ranks,
)
from torch import Tensor, nn
from training_cases import assert_bitwise

pytestmark = needs("transformers", "peft")

LR = 1e-2
CPU = torch.device("cpu")


def build(kind: str) -> nn.Module:
    example = load_example("peft_lora")
    base = example.build_base(kind == "nf4")
    if kind == "int8":
        from bitsandbytes.nn import Int8Params, Linear8bitLt

        for layer in base.model.layers:
            linear = layer.mlp.up_proj
            layer.mlp.up_proj = Linear8bitLt(linear.in_features, linear.out_features, False, has_fp16_weights=False)
            layer.mlp.up_proj.weight = Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
            layer.mlp.up_proj.to(CPU)  # quantises it
    return example.add_adapters(base)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train(rank: int, kind: str, stage: int | None, steps: int = 3) -> tuple[nn.Module, list[Tensor]]:
    """The model, and its adapters afterwards. ``stage``: None is AdamW in DDP."""
    model = build(kind)
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    if stage == 3:
        zero_optim.shard_module(model, ("LlamaDecoderLayer",))
    parameters, options = trained(model).items(), {"lr": LR, "eps": EPS}
    if stage is None:
        module, optimizer = replicate(model), torch.optim.AdamW([p for _, p in parameters], **options)
    else:
        module, optimizer = model, zero_optim.ShardedAdamW(parameters, stage=stage, **options)
    for step in range(steps):
        tokens = load_example("peft_lora").draw(step, rank, CPU)
        module(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage is not None:
        optimizer.close()
    return model, list(zero_optim.full_model_state_dict(model, None, trained_only=True).values())


def stages(rank: int, world_size: int, kind: str) -> dict[str, list[Tensor]]:
    """Stage 3 where it shards this kind of base. After one step AdamW is near: then what is rounded to 16 bits, or to
    fewer, in the forward carries the last bits of its adapters into others of their gradients."""
    of_stage = {str(stage): train(rank, kind, stage)[1] for stage in (0, 1, 2, 3) if (kind, stage) != ("int8", 3)}
    once = {"once": train(rank, kind, 2, 1)[1], "AdamW": train(rank, kind, None, 1)[1]}
    return {**of_stage, **once}


def check(found: dict[str, list[Tensor]]) -> None:
    assert_like_adamw(found.pop("once"), found.pop("AdamW"), LR, 1)
    for stage, adapters in found.items():
        assert_bitwise(adapters, found["2"], f"stage {stage}")


@pytest.mark.parametrize("kind", ["bf16", pytest.param("nf4", marks=[needs("bitsandbytes"), slow])])
def test_adapters_train_as_with_adamw_at_every_stage(kind: str) -> None:
    check(assert_ranks_alike(run_client_ranks(2, stages, kind)))
    check(stages(0, 1, kind))


def eight_bits(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    with pytest.raises(zero_optim.ParameterError, match=r"up_proj.weight' is torch\.int8"):
        zero_optim.shard_module(build("int8"), ("LlamaDecoderLayer",))
    return stages(rank, world_size, "int8")


@needs("bitsandbytes")
def test_a_base_of_eight_bits_is_for_stages_up_to_2() -> None:
    check(assert_ranks_alike(run_client_ranks(2, eight_bits)))


def through_the_wrapper(rank: int, world_size: int, folder: str) -> None:
    model, _ = train(rank, "bf16", 3)
    with zero_optim.gather_parameters(model):
        ordinary = copy.deepcopy(model)
    prompt, options = load_example("peft_lora").draw(9, rank, CPU)[:1, :4], {"max_new_tokens": 4, "do_sample": False}
    expected = ordinary.generate(input_ids=prompt, **options)
    assert torch.equal(model.generate(input_ids=prompt, **options), expected)
    for save in (model, model.base_model.model):
        target = Path(folder, f"{rank}-{type(save).__name__}")
        with pytest.raises(zero_optim.ShardAccessError, match=r"base_model\.model\."):
            save.save_pretrained(target)
        assert not [name for name in os.listdir(target) if name.endswith((".safetensors", ".bin"))]
    with torch.no_grad(), zero_optim.gather_parameters(model, writeback=True):
        merged = model.merge_and_unload()
    del model
    whole = ordinary.merge_and_unload()
    with torch.no_grad():
        assert torch.equal(merged(input_ids=prompt).logits, whole(input_ids=prompt).logits)
    assert torch.equal(merged.generate(input_ids=prompt, **options), whole.generate(input_ids=prompt, **options))
    assert_bitwise(
        list(zero_optim.full_model_state_dict(merged, None).values()), list(whole.state_dict().values()), "merged"
    )


def test_a_wrapped_and_a_merged_model_generate(tmp_path: Path) -> None:
    run_client_ranks(2, through_the_wrapper, str(tmp_path))


def run_example(rank: int, world_size: int, folder: str, options: list[str]) -> dict[str, Tensor]:
    with as_torchrun(rank, world_size):
        adapter, model = load_example("peft_lora").main(["--steps", "2", "--output", folder, *options])
    assert bool(adapter) == (rank == 0)
    return zero_optim.full_model_state_dict(model, None)


@pytest.mark.parametrize("options", [[], pytest.param(["--nf4"], marks=needs("bitsandbytes"))], ids=["bf16", "nf4"])
def test_the_example_saves_what_others_load(options: list[str], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    whole = run_client_ranks(2, run_example, str(tmp_path), options)[1]
    loaded = PeftModel.from_pretrained(load_example("peft_lora").build_base(bool(options)), tmp_path / "adapter")
    if options:
        adapters = {name: value for name, value in whole.items() if "lora_" in name}
        assert adapters and all(torch.equal(loaded.state_dict()[name], value) for name, value in adapters.items())
        return
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).state_dict()
    by_adapter = loaded.merge_and_unload().state_dict()
    assert merged.keys() == whole.keys() == by_adapter.keys()
    for name, value in merged.items():
        assert torch.equal(value, whole[name]) and torch.equal(value, by_adapter[name]), name
