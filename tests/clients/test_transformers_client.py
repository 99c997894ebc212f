"""Hugging Face models: in a loop of one's own and in ``transformers.Trainer``, on one rank and on two."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from client_cases import (
    EPS,
    as_torchrun,
    assert_like_adamw,
    assert_ranks_alike,
    close,
    load_example,
    needs,
    replicate,
    run_client_ranks,
    weights,
)
from torch import nn
from training_cases import assert_bitwise

pytestmark = [
    needs("transformers", "accelerate"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning"),  # has a new name in its version 5
]

LR = 1e-3


# -- a loop of one's own ------------------------------------------------------------------------------------------


def train_in_loop(example: Any, name: str, make_optimizer: Any, steps: int, rank: int) -> nn.Module:
    """The example's loop with any optimizer: accumulation, clipping, a schedule from transformers."""
    from transformers import get_scheduler

    model = example.build_model(name).train()
    optimizer = make_optimizer(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1)
    sharded = isinstance(optimizer, zero_optim.ShardedAdamW)
    module = model if sharded else replicate(model)
    if sharded:
        optimizer.attach(model)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=20)
    for step in range(steps):
        for micro in range(example.MICRO_BATCHES):
            tokens = example.draw(step, micro, rank, torch.device("cpu"))
            owner = optimizer if sharded else module
            last = micro == example.MICRO_BATCHES - 1 or not hasattr(owner, "no_sync")
            with contextlib.nullcontext() if last else owner.no_sync():
                (module(input_ids=tokens, labels=tokens).loss / example.MICRO_BATCHES).backward()
        if sharded:
            optimizer.clip_grad_norm_(0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    close(optimizer)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_trains_as_with_adamw(name: str) -> None:
    example = load_example("transformers_loop")
    ours = train_in_loop(example, name, zero_optim.ShardedAdamW, 5, rank=0)
    expected = train_in_loop(example, name, torch.optim.AdamW, 5, rank=0)
    assert_like_adamw(weights(ours), weights(expected), LR, 5)


def _loop(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        example = load_example("transformers_loop")
        overlapping = partial(zero_optim.ShardedAdamW, overlap_param_gather=True)
        found = {
            "overlapped": weights(train_in_loop(example, "gpt2", overlapping, 4, rank)),
            "ours": weights(train_in_loop(example, "gpt2", zero_optim.ShardedAdamW, 4, rank)),
            "expected": weights(train_in_loop(example, "gpt2", torch.optim.AdamW, 4, rank)),
            "straight": weights(example.main(["--model", "llama", "--steps", "4"])),
            "stage 3": weights(example.main(["--model", "llama", "--steps", "4", "--stage", "3"])),
        }
        example.main(["--model", "llama", "--steps", "2", "--checkpoint", folder])
        resumed = example.main(["--model", "llama", "--steps", "4", "--checkpoint", folder])
        return {**found, "resumed": weights(resumed)}


def test_the_loop_on_two_ranks(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _loop, str(tmp_path)))
    assert_like_adamw(found["ours"], found["expected"], LR, 4)
    assert_bitwise(found["overlapped"], found["ours"], "gathered during the forward")
    assert_bitwise(found["resumed"], found["straight"], "resumed")
    assert_like_adamw(found["stage 3"], found["straight"], LR, 4)  # it adds up clipping norms in another order
    alone = load_example("transformers_loop").main(["--model", "llama", "--steps", "4", "--checkpoint", str(tmp_path)])
    assert_bitwise(weights(alone), found["straight"], "two ranks' checkpoint on one")


# -- Trainer ------------------------------------------------------------------------------------------------------


def train_with_trainer(
    kind: Any, optimizer: Any, folder: Any, steps: int, *, ready: bool, resume: Any = None, **options: Any
) -> nn.Module:
    """GPT-2 after ``steps`` of a Trainer of class ``kind``, which is given a ``ready`` optimizer or makes it.

    In the second case the model recomputes its activations, by backwards within the backward.
    """
    settings = {"per_device_train_batch_size": 4, "learning_rate": LR, "warmup_steps": 2, "max_steps": steps}

    def given(model: nn.Module) -> dict[str, Any]:
        if ready:
            return {"optimizers": (optimizer(model.named_parameters(), lr=LR, eps=EPS), None)}
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return {"optimizer_cls_and_kwargs": (optimizer, {"lr": LR, "eps": EPS})}

    model, trainer = _trainer(kind, folder, given, **{**settings, **options})
    trainer.train(resume_from_checkpoint=resume)
    close(trainer.optimizer.optimizer)
    return model


def _trainer(
    kind: Any, folder: Any, given: Callable[[nn.Module], dict[str, Any]], **options: Any
) -> tuple[nn.Module, Any]:
    """GPT-2, and what trains it. ``given``: more arguments of the Trainer, which may need the model."""
    from transformers import TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 100}
    model = load_example("transformers_loop").build_model("gpt2")
    tokens = [(torch.arange(32) + start) % 128 for start in range(64)]
    data = [{"input_ids": counting, "labels": counting} for counting in tokens]
    arguments = TrainingArguments(str(folder), **{**quiet, **options})
    return model, kind(model, arguments, train_dataset=data, eval_dataset=data[:16], **given(model))


TRAINER_OPTIONS = {
    "a_ready_optimizer": {"ready": True, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"},
    "made_by_trainer": {"ready": False, "weight_decay": 0.1},
    "no_clipping": {"ready": True, "max_grad_norm": 0.0},
}


@pytest.mark.parametrize("options", TRAINER_OPTIONS.values(), ids=TRAINER_OPTIONS)
def test_trainer_trains_as_with_adamw(options: dict[str, Any], tmp_path: Any) -> None:
    from transformers import Trainer

    ours = train_with_trainer(Trainer, zero_optim.ShardedAdamW, tmp_path, 5, **options)
    expected = train_with_trainer(Trainer, torch.optim.AdamW, tmp_path, 5, **options)
    assert_like_adamw(weights(ours), weights(expected), LR, 5)


@pytest.mark.parametrize("first", [torch.optim.AdamW, zero_optim.ShardedAdamW], ids=["AdamW", "ShardedAdamW"])
def test_a_trainer_checkpoint_resumes(first: Any, tmp_path: Any) -> None:
    """With the Trainer that everyone has. A run that AdamW began goes on too, as AdamW's own would have."""
    from transformers import Trainer

    options = {"ready": False, "save_strategy": "steps", "save_steps": 3}
    straight = train_with_trainer(Trainer, first, tmp_path, 6, **options)
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = train_with_trainer(Trainer, zero_optim.ShardedAdamW, tmp_path, 6, resume=checkpoint, **options)
    if first is zero_optim.ShardedAdamW:
        assert_bitwise(weights(resumed), weights(straight), "resumed")
    assert_like_adamw(weights(resumed), weights(straight), LR, 6)


def test_a_trainer_evaluates_the_averages(tmp_path: Any) -> None:
    from zero_optim.integrations.transformers import ShardedTrainer

    options = {"max_steps": 4, "learning_rate": 0.01, "eval_on_start": True}
    model, trainer = _trainer(ShardedTrainer, tmp_path, lambda model: {"ema_decay": 0.5}, **options)
    trainer.train()
    own, optimizer = weights(model), trainer.optimizer.optimizer
    found = trainer.evaluate()["eval_loss"]
    assert_bitwise(weights(model), own, "after the evaluation")
    average = optimizer.ema_state_dict()
    close(optimizer)
    trainer.optimizer = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
    assert found == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)


# -- generation at stage 3, where ranks end at different lengths ---------------------------------------------------


def _generates(rank: int, world_size: int) -> None:
    model = load_example("transformers_loop").build_model("gpt2").eval()
    ordinary = copy.deepcopy(model)
    zero_optim.shard_module(model, ("GPT2Block",))
    prompt = torch.arange(4)[None] + rank
    options = {"do_sample": False, "max_new_tokens": 2 + 3 * rank, "pad_token_id": 0}
    expected = ordinary.generate(prompt, **options)
    assert expected.shape[1] == 6 + 3 * rank
    for given in ({}, {"synced_gpus": False}, {"synced_gpus": True}):
        assert torch.equal(model.generate(prompt, **options, **given), expected)
    with zero_optim.gather_parameters(model):
        sharded_again = copy.deepcopy(model)
    zero_optim.shard_module(sharded_again, ("GPT2Block",))
    assert torch.equal(sharded_again.generate(prompt, **options), expected)
    zero_optim.register_forward_method(model, "generate")
    assert torch.equal(model.generate(prompt, **options), expected)
    with zero_optim.gather_parameters(model):
        duplicate = copy.deepcopy(model)
        if rank == 1:  # there a rank may be alone, in a copy too
            assert torch.equal(model.generate(prompt, **options), expected)
            assert torch.equal(duplicate.generate(prompt, **options), expected)


def test_ranks_that_end_at_different_lengths_generate_together() -> None:
    run_client_ranks(2, _generates, timeout=60)


def _stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _predicts(rank: int, world_size: int, folder: str) -> None:
    from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    with as_torchrun(rank, world_size):
        from zero_optim.integrations.transformers import ShardedSeq2SeqTrainer

        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        data = [{"input_ids": torch.arange(3, 9) + row, "labels": torch.arange(3, 6) + row} for row in range(4)]
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "ddp_backend": "gloo"}
        arguments = Seq2SeqTrainingArguments(
            folder, predict_with_generate=True, per_device_eval_batch_size=2, max_steps=1, learning_rate=0.0, **quiet
        )
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, **sizes))
        whole = copy.deepcopy(model).eval()
        trainer = ShardedSeq2SeqTrainer(model, arguments, units=("T5Block",), train_dataset=data, data_collator=_stack)
        trainer.train()
        predicted = trainer.predict(data, max_new_tokens=3 + 2 * rank).predictions
        close(trainer.optimizer.optimizer)
        assert trainer.optimizer.optimizer.stage == 3
        for row, tokens in enumerate(predicted):  # each rank has two rows
            source = data[row]["input_ids"][None]
            (expected,) = whole.generate(source, max_new_tokens=3 + 2 * (row // 2)).tolist()
            assert tokens[: len(expected)].tolist() == expected and not tokens[len(expected) :].any()


def test_a_seq2seq_trainer_predicts_with_generate(tmp_path: Any) -> None:
    run_client_ranks(2, _predicts, str(tmp_path), timeout=120)
