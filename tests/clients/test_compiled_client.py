"""A ``torch.compile``d model, on two ranks."""

from __future__ import annotations

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
    replicate,
    weights,
)
from harness import run_ranks
from torch import nn
from torch.nn import functional as F
from training_cases import assert_bitwise

LR, STEPS = 1e-2, 5


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    yield
    torch.compiler.reset()


def train(make_optimizer: Any, rank: int = 0, backend: str | None = None, model: nn.Module | None = None) -> nn.Module:
    """The example's model, or ``model``, after STEPS steps; ``backend`` None: not compiled."""
    example = load_example("compile_model")
    model = model or example.build_model()
    optimizer = make_optimizer(model.parameters(), lr=LR, eps=EPS)
    sharded = isinstance(optimizer, zero_optim.ShardedAdamW)
    module = model if sharded else replicate(model)
    if backend:
        module = torch.compile(module, backend=backend)
    if sharded:
        optimizer.attach(module)
    for step in range(STEPS):
        x, y = example.draw(step, rank)
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(optimizer)
    return model


def run_example(folder: str) -> dict[str, Any]:
    main, compiled = load_example("compile_model").main, ["--backend", "aot_eager"]
    straight = main(["--steps", "4", *compiled])
    main(["--steps", "2", "--checkpoint", f"{folder}/state.pt", *compiled])
    resumed = main(["--steps", "4", "--checkpoint", f"{folder}/state.pt", *compiled])
    return {"straight": weights(straight), "resumed": weights(resumed)}


def _on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    overlapping = partial(zero_optim.ShardedAdamW, overlap_param_gather=True)
    with as_torchrun(rank, world_size):
        return {
            "overlapped": weights(train(overlapping, rank, "aot_eager")),
            "ours": weights(train(zero_optim.ShardedAdamW, rank, "aot_eager")),
            "expected": weights(train(torch.optim.AdamW, rank)),
            **run_example(folder),
        }


def test_two_ranks(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_ranks(2, _on_two_ranks, str(tmp_path)))
    assert_like_adamw(found["ours"], found["expected"], LR, STEPS)
    assert_bitwise(found["overlapped"], found["ours"], "gathered during the forward")
    assert_bitwise(found["resumed"], found["straight"], "resumed")
