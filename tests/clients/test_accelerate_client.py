"""Hugging Face ``accelerate`` as it is, on one rank: prepare, accumulate, clip, and either scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zero_optim
from client_cases import EPS, assert_like_adamw, close, forget_accelerator, load_example, needs, weights
from torch import nn
from torch.nn import functional as F

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
