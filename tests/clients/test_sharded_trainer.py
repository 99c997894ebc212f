"""``ShardedTrainer``: stages 0 to 3 on one rank and on two, as Trainer with AdamW in DDP; what it saves and loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from client_cases import (
    ALONE_SLOW,
    EPS,
    as_torchrun,
    assert_like_adamw,
    assert_ranks_alike,
    close,
    gathers_in_flight,
    load_example,
    needs,
    reductions_a_step,
    run_client_ranks,
    weights,
)
from torch import Tensor, nn
from training_cases import assert_bitwise

pytestmark = [
    needs("transformers", "accelerate"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning"),  # has a new name in its version 5
]

LR, STEPS = 1e-3, 4


def make_trainer(kind: Any, folder: str, model: nn.Module | None = None, *, how: Any = None, **options: Any) -> Any:
    """A Trainer of class ``kind`` for GPT-2: two micro-batches a step, clipped, with gradient checkpointing.

    The best of its checkpoints is the one with the highest loss, which is not the last.
    """
    from transformers import TrainingArguments

    settings = {"max_steps": STEPS, "learning_rate": LR, "weight_decay": 0.1, "warmup_steps": 2, "adam_epsilon": EPS}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    settings |= {"gradient_checkpointing": True, "eval_strategy": "steps", "save_strategy": "steps"}
    settings |= {"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 100, "ddp_backend": "gloo"}
    arguments = TrainingArguments(folder, **{**settings, **quiet, **options})
    how = {**(how or {})}
    if "model_init" not in how:
        how["model"] = model or load_example("transformers_loop").build_model("gpt2")
    data = [{"input_ids": tokens, "labels": tokens} for tokens in (torch.arange(16) + start for start in range(64))]
    return kind(args=arguments, train_dataset=data, eval_dataset=data[:4], **how)


def recorder() -> Any:
    """A callback that keeps the weights that the last step left: afterwards the best ones are loaded."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        last: list[Tensor]

        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            if state.global_step == STEPS:
                self.in_flight = gathers_in_flight(known["optimizer"].optimizer)
                self.last = weights(known["model"])

    return Recorder()


def train(kind: Any, folder: str, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """``last``: the weights after the last step, which has left gathers ``in flight``. ``best``: those of the model in
    the end. ``trainer``."""
    trainer, seen = make_trainer(kind, folder, **options), recorder()
    trainer.add_callback(seen)
    trainer.train(resume_from_checkpoint=resume)
    return {"last": seen.last, "in flight": seen.in_flight, "best": weights(trainer.model), "trainer": trainer}


def from_pretrained(folder: str) -> list[Tensor]:
    """As a process without sharding reads it."""
    from transformers import GPT2LMHeadModel

    return weights(GPT2LMHeadModel.from_pretrained(folder))


def at_stage(stage: int) -> dict[str, Any]:
    """What a ShardedTrainer is given for it."""
    return {"stage": stage, "units": ("GPT2Block",) if stage == 3 else None}


def _all_stages(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        from transformers import Trainer
        from zero_optim.integrations.transformers import ShardedTrainer

        expected = train(Trainer, f"{folder}/adamw")
        found = {"expected last": expected["last"], "expected best": expected["best"]}
        for stage in range(4):
            place = f"{folder}/{stage}"
            straight = train(ShardedTrainer, place, how=at_stage(stage))
            optimizer = straight["trainer"].optimizer.optimizer
            assert optimizer.stage == stage and optimizer.stats()["steps"] == STEPS
            assert world_size == 1 or reductions_a_step(optimizer) == 1
            assert straight["in flight"] == (world_size > 1 and stage in (1, 2))
            optimizer.close()
            resumed = train(ShardedTrainer, place, f"{place}/checkpoint-2", how=at_stage(stage))
            close(resumed["trainer"].optimizer.optimizer)
            assert_bitwise(resumed["last"], straight["last"], f"resumed at stage {stage}")
            assert_bitwise(from_pretrained(f"{place}/checkpoint-4"), straight["last"], f"saved at stage {stage}")
            assert_bitwise(from_pretrained(f"{place}/checkpoint-2"), straight["best"], f"the best at stage {stage}")
            found |= {f"last {stage}": straight["last"], f"best {stage}": straight["best"]}
        return found


@pytest.mark.parametrize("ranks", ALONE_SLOW)
def test_every_stage_trains_saves_and_resumes(ranks: int, tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(ranks, _all_stages, str(tmp_path), timeout=180))
    for stage in range(4):
        assert_like_adamw(found[f"last {stage}"], found["expected last"], LR, STEPS)
        assert_like_adamw(found[f"best {stage}"], found["expected best"], LR, 2)
    assert not torch.equal(found["last 3"][0], found["best 3"][0])


# -- precision ----------------------------------------------------------------------------------------------------


def scaled(kind: Any, scaler: Any) -> Any:
    """The Trainer with a scaler, which accelerate makes for fp16 on a GPU alone."""

    class Scaled(kind):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = scaler

    return Scaled


def masters(model: nn.Module, optimizer: zero_optim.ShardedAdamW) -> list[Tensor]:
    whole = {name: tensor.clone() for name, tensor in zero_optim.iter_full_parameters(model, optimizer, torch.float32)}
    return [whole[name] for name, _ in model.named_parameters()]


def _precisions(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        from transformers import Trainer
        from zero_optim.integrations.transformers import ShardedTrainer

        build = load_example("transformers_loop").build_model
        run = partial(train, save_strategy="no", load_best_model_at_end=False)
        found = {
            "expected fp32": run(Trainer, folder)["last"],
            "expected bf16": run(Trainer, folder, bf16=True)["last"],
        }
        for stage in (2, 3):
            kind, how = ShardedTrainer, at_stage(stage)
            with_scaler = scaled(kind, zero_optim.GradScaler(init_scale=2.0**10))
            runs = {
                "scaled": run(with_scaler, folder, how=how),
                "bf16": run(kind, folder, bf16=True, how=how),
                "plain bf16": run(kind, folder, model=build("gpt2").bfloat16(), how=how),
                "plain fp16": run(with_scaler, folder, model=build("gpt2").half(), how=how),
            }
            for name, one in runs.items():
                optimizer = one["trainer"].optimizer.optimizer
                found[f"{name} {stage}"] = masters(one["trainer"].model, optimizer)
                optimizer.close()
        return found


@pytest.mark.slow
def test_every_precision(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _precisions, str(tmp_path), timeout=180))
    for stage in (2, 3):
        assert_like_adamw(found[f"scaled {stage}"], found["expected fp32"], LR, STEPS)
        for name, expected in (("bf16", "bf16"), ("plain bf16", "fp32"), ("plain fp16", "fp32")):
            for ours, torchs in zip(found[f"{name} {stage}"], found[f"expected {expected}"], strict=True):
                assert (ours - torchs).abs().mean() < LR / 4  # they have moved by about STEPS * LR / 2


# -- adapters ------------------------------------------------------------------------------------------------------


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = load_example("transformers_loop").build_model("gpt2")
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))


def _adapters(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    with as_torchrun(rank, world_size):
        from zero_optim.integrations.transformers import ShardedTrainer

        options = {"how": at_stage(3), "gradient_checkpointing": False}
        straight = train(ShardedTrainer, folder, model=lora(), **options)
        close(straight["trainer"].optimizer.optimizer)
        resumed = train(ShardedTrainer, folder, f"{folder}/checkpoint-2", model=lora(), **options)
        close(resumed["trainer"].optimizer.optimizer)
        assert_bitwise(resumed["last"], straight["last"], "resumed")
        names = [name.replace(".default", "") for name, _ in straight["trainer"].model.named_parameters()]
        for number, when in ((2, "best"), (4, "last")):
            trained = dict(zip(names, straight[when], strict=True))
            saved = load_file(f"{folder}/checkpoint-{number}/adapter_model.safetensors")
            assert_bitwise(list(saved.values()), [trained[name] for name in saved], f"{when} adapters in the file")
            assert len(saved) == 4  # and nothing of the base
        return {"last": straight["last"]}


@needs("peft")
def test_adapters_on_a_sharded_base(tmp_path: Any) -> None:
    assert_ranks_alike(run_client_ranks(2, _adapters, str(tmp_path), timeout=180))


# -- from and to other optimizers, and what raises -----------------------------------------------------------------


def _continued(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        from transformers import Trainer
        from zero_optim.integrations.transformers import ShardedTrainer

        straight = train(Trainer, folder)
        found = {"straight": straight["last"]}
        for stage in (2, 3):
            here = train(ShardedTrainer, f"{folder}/{stage}", f"{folder}/checkpoint-2", how=at_stage(stage))
            close(here["trainer"].optimizer.optimizer)
            found[f"here {stage}"] = here["last"]
        return found


def test_a_run_of_adamw_in_ddp_goes_on(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _continued, str(tmp_path)))
    for stage in (2, 3):
        assert_like_adamw(found[f"here {stage}"], found["straight"], LR, STEPS)


class Counting(nn.Module):
    """A model with a buffer that each rank makes what it likes of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = load_example("transformers_loop").build_model("gpt2")
        self.register_buffer("seen", torch.zeros(()))
        self.evaluated: list[float] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        if self.training:
            self.seen += input_ids.sum()
        else:
            self.evaluated.append(self.seen.item())
        return self.inner(input_ids=input_ids, labels=labels)


def _buffers(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        from zero_optim.integrations.transformers import ShardedTrainer

        found = {}
        for stage in (2, 3):
            how = {**at_stage(stage), "sync_buffers": "mean"}
            options = {"load_best_model_at_end": False, "save_strategy": "no", "gradient_checkpointing": False}
            trainer = train(ShardedTrainer, folder, model=Counting(), how=how, **options)["trainer"]
            found[f"evaluated {stage}"] = [torch.tensor(trainer.model.evaluated)]
            close(trainer.optimizer.optimizer)
        return found


def test_buffers_are_the_same_on_all_ranks(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _buffers, str(tmp_path), timeout=180))
    assert all(found[f"evaluated {stage}"][0].min() > 0 for stage in (2, 3))


def _misused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    with as_torchrun(rank, world_size):
        from zero_optim.integrations.transformers import ShardedTrainer

        def message(**options: Any) -> str:
            with pytest.raises((zero_optim.ZeroOptimError, TypeError, ValueError)) as raised:
                make_trainer(ShardedTrainer, folder, **options).train()
            return f"{type(raised.value).__name__}: {raised.value}"

        model = load_example("transformers_loop").build_model("gpt2")
        ready = zero_optim.ShardedAdamW(model.named_parameters())
        found = {"late": message(model=model, how={"optimizers": (ready, None), "units": ("GPT2Block",)})}
        ready.close()
        adamw = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {})}
        return found | {
            "torch's": message(how=adamw),
            "optim": message(optim="adafactor"),
            "unsharded": message(how={"stage": 3}),
            "no such unit": message(how={"units": ("GPTBlock",)}),
        }


def test_misuse_says_what_to_do(tmp_path: Any) -> None:
    for found in run_client_ranks(2, _misused, str(tmp_path)):
        assert found["late"].startswith("ParameterError") and "before making the optimizer" in found["late"]
        assert "make a zero_optim.ShardedAdamW" in found["torch's"]
        assert "optim='adafactor'" in found["optim"]
        assert found["unsharded"].startswith("ParameterError") and "shard_module" in found["unsharded"]
        assert "no module of the model is a unit" in found["no such unit"]


# -- trainings of one Trainer --------------------------------------------------------------------------------------

TRAININGS: tuple[dict[str, Any], ...] = (
    {"learning_rate": LR},
    {"learning_rate": 5 * LR, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5, "weight_decay": 0.3},
    {"optim": "sgd", "optim_args": "momentum=0.5", "weight_decay": 0.2},
)


def trainings(kind: Any, folder: str, how: Any = None) -> Iterator[Any]:
    """The Trainer after each of its trainings, in which a hyper-parameter search has set its arguments."""
    how = {**(how or {}), "model_init": partial(load_example("transformers_loop").build_model, "gpt2")}
    off = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "warmup_steps": 0}
    trainer = make_trainer(kind, folder, how=how, max_steps=2, gradient_checkpointing=False, **off)
    for chosen in TRAININGS:
        for name, value in chosen.items():
            setattr(trainer.args, name, type(getattr(trainer.args, name) or "")(value))
        trainer.train()
        yield trainer


def _trainings(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        from transformers import Trainer
        from zero_optim.integrations.transformers import ShardedTrainer

        found, options = {}, []
        for number, trainer in enumerate(trainings(Trainer, folder)):
            found[f"expected {number}"] = weights(trainer.model)
            options.append([dict(group) for group in trainer.optimizer.param_groups])
        for stage in (0, 2, 3):
            files: list[int] = []
            earlier: Any = None  # optimizer and model of the training before
            for number, trainer in enumerate(trainings(ShardedTrainer, folder, at_stage(stage))):
                found[f"{number} at stage {stage}"] = weights(trainer.model)
                optimizer = trainer.optimizer.optimizer
                assert optimizer.stage == stage
                for group, torchs in zip(optimizer.param_groups, options[number], strict=True):
                    for name in {"lr", "betas", "eps", "momentum", "weight_decay"} & torchs.keys():
                        assert group[name] == torchs[name], f"{name} of training {number}"
                if earlier is not None:
                    with pytest.raises(zero_optim.ClosedError):
                        earlier[0].step()
                    assert_bitwise(weights(earlier[1]), found[f"{number - 1} at stage {stage}"], "the model before")
                earlier = optimizer, trainer.model
                files.append(len(os.listdir("/proc/self/fd")))
            assert files[1] == files[2], files
            optimizer.close()
        return found


def test_another_training_has_the_arguments_of_its_own(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _trainings, str(tmp_path), timeout=180))
    for stage in (0, 2, 3):
        for number in range(len(TRAININGS)):
            assert_like_adamw(found[f"{number} at stage {stage}"], found[f"expected {number}"], LR, 2)


# -- other classes derived from Trainer ----------------------------------------------------------------------------


def _makes(rank: int, world_size: int) -> None:
    from transformers import Seq2SeqTrainer, Trainer
    from zero_optim.integrations.transformers import ShardedSeq2SeqTrainer, ShardedTrainer, sharded

    made = sharded(Seq2SeqTrainer)
    assert made.__name__ == ShardedSeq2SeqTrainer.__name__ == "ShardedSeq2SeqTrainer"
    assert made.__mro__[1:4] == (ShardedTrainer, Seq2SeqTrainer, Trainer)
    assert sharded(Trainer) is ShardedTrainer and sharded(made) is made
    for wrong in (nn.Module, "SFTTrainer", ShardedTrainer.__init__):
        with pytest.raises(TypeError, match="not a class derived from transformers.Trainer"):
            sharded(wrong)


def test_a_sharded_class_of_any_trainer() -> None:
    run_client_ranks(1, _makes)


def _fine_tuned(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), mock.patch.dict(os.environ, {"CI": "1"}):  # there trl sends no telemetry
        example = load_example("trl_sft")
        plain, config = example.SFTTrainer, partial(example.SFTConfig, adam_epsilon=EPS, disable_tqdm=True)
        example.SFTConfig, kind = config, example.ShardedSFTTrainer
        example.ShardedSFTTrainer = lambda *given, stage, units, **options: plain(*given, **options)
        found = {"expected": weights(example.main(["--steps", "12", "--output", f"{folder}/plain"]).model)}
        example.ShardedSFTTrainer = kind
        for stage in ("2", "3"):
            options = ["--stage", stage, "--output", f"{folder}/{stage}"]
            close(example.main(["--steps", "10", *options]).optimizer.optimizer)
            resumed = example.main(["--steps", "12", *options, "--resume"])
            assert isinstance(resumed, plain) and resumed.optimizer.optimizer.stage == int(stage)
            found[f"resumed {stage}"] = weights(resumed.model)
            close(resumed.optimizer.optimizer)
            assert_bitwise(from_pretrained(f"{folder}/{stage}/checkpoint-12"), found[f"resumed {stage}"], "saved")
        return found


@pytest.mark.slow
@needs("trl", "datasets")
@pytest.mark.parametrize("ranks", ALONE_SLOW)
def test_the_example_of_trl(ranks: int, tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(ranks, _fine_tuned, str(tmp_path), timeout=180))
    for stage in (2, 3):
        assert_like_adamw(found[f"resumed {stage}"], found["expected"], LR, 12)


# -- the example ---------------------------------------------------------------------------------------------------


def _example(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        main = load_example("hf_trainer").main
        found = {}
        for stage in ("2", "3"):
            place = os.path.join(folder, stage)
            straight = main(["--steps", "12", "--output", f"{place}/straight", "--stage", stage])
            close(straight.optimizer.optimizer)
            close(main(["--steps", "10", "--output", f"{place}/halves", "--stage", stage]).optimizer.optimizer)
            resumed = main(["--steps", "12", "--output", f"{place}/halves", "--stage", stage, "--resume"])
            found |= {f"straight {stage}": weights(straight.model), f"resumed {stage}": weights(resumed.model)}
            close(resumed.optimizer.optimizer)
        return found


def _example_goes_on(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        saved = from_pretrained(f"{folder}/checkpoint-12")
        trainer = load_example("hf_trainer").main(["--steps", "14", "--output", folder, "--resume"])
        optimizer = trainer.optimizer.optimizer
        assert optimizer.state_dict()["state"]["transformer.wte.weight"]["step"] == 14
        optimizer.close()
        return {"saved": saved, "weights": weights(trainer.model)}


@pytest.mark.parametrize("ranks", ALONE_SLOW)
def test_the_example(ranks: int, tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(ranks, _example, str(tmp_path), timeout=180))
    for stage in (2, 3):
        assert_bitwise(found[f"resumed {stage}"], found[f"straight {stage}"], f"resumed at stage {stage}")
    folder = str(tmp_path / "3" / "straight")  # on another number of ranks, at stage 2
    elsewhere = assert_ranks_alike(run_client_ranks(3 - ranks, _example_goes_on, folder, timeout=180))
    for after, before in zip(elsewhere["weights"], elsewhere["saved"], strict=True):
        assert 0 < (after - before).abs().max() < 4 * LR
