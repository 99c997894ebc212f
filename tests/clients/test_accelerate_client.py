"""Hugging Face ``accelerate``: prepare, accumulate, clip, save_state and load_state, on one rank and on two."""

from __future__ import annotations

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
    forget_accelerator,
    load_example,
    needs,
    weights,
)
from harness import run_ranks
from torch import nn
from torch.nn import functional as F
from training_cases import assert_bitwise

pytestmark = needs("accelerate")

LR = 1e-2


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Any:
    yield
    forget_accelerator()


def train(make_optimizer: Any, steps: int, scaler: Any = None) -> nn.Module:
    """As accelerate's documentation has it: everything prepared, with accelerate's own clipping, in DDP on ranks."""
    from accelerate import Accelerator

    example = load_example("accelerate_loop")
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, mixed_precision="fp16" if scaler else "no")
    accelerator.scaler = scaler
    model = example.build_model()
    optimizer = make_optimizer(model.parameters(), lr=LR, eps=EPS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=100, div_factor=1)
    module, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in range(steps * 2):
        x, y = example.draw(step, accelerator.process_index)
        with accelerator.accumulate(module):
            accelerator.backward(F.cross_entropy(module(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    close(optimizer.optimizer)
    return model


def test_it_trains_as_with_adamw() -> None:
    ours, expected = train(zero_optim.ShardedAdamW, 5), train(torch.optim.AdamW, 5)
    assert_like_adamw(weights(ours), weights(expected), LR, 5)


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, zero_optim.GradScaler], ids=["torch", "zero_optim"])
def test_either_scaler_scales(scaler: Any) -> None:
    """What accelerate does for fp16 on a GPU. Its wrapper gives the scaler a closure that is None."""
    ours = train(zero_optim.ShardedAdamW, 5, scaler("cpu"))
    forget_accelerator()
    expected = train(torch.optim.AdamW, 5, torch.amp.GradScaler("cpu"))
    assert_like_adamw(weights(ours), weights(expected), LR, 5)


def test_a_checkpoint_has_every_parameter(tmp_path: Any) -> None:
    """Of accelerate's own: of tensors that share a storage it would keep one."""
    from accelerate import Accelerator
    from safetensors.torch import load_file, load_model

    example = load_example("accelerate_loop")
    model = example.main(["--steps", "2"])
    Accelerator(cpu=True).save_model(model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {name for name, _ in model.named_parameters()}
    fresh = example.build_model()
    load_model(fresh, tmp_path / "model.safetensors")
    assert_bitwise(weights(fresh), weights(model), "weights from the file")


def run_example(folder: str, steps: int = 4) -> dict[str, Any]:
    main = load_example("accelerate_loop").main
    straight = main(["--steps", str(steps)])
    main(["--steps", str(steps // 2), "--checkpoint", folder])
    resumed = main(["--steps", str(steps), "--checkpoint", folder])
    return {"straight": weights(straight), "resumed": weights(resumed)}


def test_the_example(tmp_path: Any) -> None:
    found = run_example(str(tmp_path / "state"))
    assert_bitwise(found["resumed"], found["straight"], "resumed")


def _on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        return {"expected": weights(_train_example_with_adamw(rank, 4)), **run_example(folder)}


def _train_example_with_adamw(rank: int, steps: int) -> nn.Module:
    """What the example does, by AdamW in DDP."""
    example = load_example("accelerate_loop")
    model = example.build_model().train()
    module = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step in range(steps):
        for micro in range(example.MICRO_BATCHES):
            x, y = example.draw(step * example.MICRO_BATCHES + micro, rank)
            (F.cross_entropy(module(x), y) / example.MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def test_two_ranks(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_ranks(2, _on_two_ranks, str(tmp_path / "state")))
    assert_like_adamw(found["straight"], found["expected"], LR, 4)
    assert_bitwise(found["resumed"], found["straight"], "resumed")
    alone = load_example("accelerate_loop").main(["--steps", "4", "--checkpoint", str(tmp_path / "state")])
    assert_bitwise(weights(alone), found["straight"], "two ranks' checkpoint on one")


def _resume_on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        return {"resumed": weights(load_example("accelerate_loop").main(["--steps", "4", "--checkpoint", folder]))}


def test_one_ranks_checkpoint_goes_on_on_two(tmp_path: Any) -> None:
    folder = str(tmp_path / "state")
    alone = weights(load_example("accelerate_loop").main(["--steps", "2", "--checkpoint", folder]))
    found = assert_ranks_alike(run_ranks(2, _resume_on_two_ranks, folder))["resumed"]
    assert not any(map(torch.equal, found, alone))
