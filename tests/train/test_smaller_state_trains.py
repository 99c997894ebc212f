"""Smaller state trains as well: a small GPT on a text of its own, against the same training with fp32 state.

`benchmarks/bench_convergence.py` does so for longer, and from several seeds.
"""

from __future__ import annotations

import random
import statistics
import string
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import zero_optim
from cells import slow
from zero_optim.train.model import GPT, ModelConfig, next_byte_loss

CONFIG = ModelConfig(1, 48, 2, 32)
STEPS, LAST, BATCH, LR = 120, 20, 8, 1e-3


@cache
def text() -> torch.Tensor:
    """Words of a small vocabulary, drawn from a seed."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(60)]
    return torch.tensor(list(" ".join(draw.choices(words, k=4000)).encode()))


def last_losses(make: Callable[[Any], torch.optim.Optimizer]) -> float:
    """The mean loss of the last steps, in nats a byte."""
    torch.manual_seed(0)
    model = GPT(CONFIG, torch.bfloat16)
    opt = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text()) - CONFIG.seq - 1, (BATCH, 1), generator=generator)
        loss = next_byte_loss(model, text()[starts + torch.arange(CONFIG.seq + 1)])
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-LAST:])


@pytest.fixture(scope="module")
def exact() -> float:
    return last_losses(partial(zero_optim.ShardedAdamW, lr=LR))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("master", "state_dtype"),
    [
        ("fp32", "bf16"),
        ("split", "bf16"),
        ("split8", "int8"),
        # Each master and each dtype of state is in one of those.
        pytest.param("split", "fp32", marks=slow),
        pytest.param("split8", "fp32", marks=slow),
        pytest.param("fp32", "bf16", marks=slow),
        pytest.param("fp32", "int8", marks=slow),
    ],
)
def test_a_smaller_state_reaches_the_same_loss(exact: float, master: str, state_dtype: str) -> None:
    make = partial(zero_optim.ShardedAdamW, lr=LR, master=master, state_dtype=state_dtype)
    assert last_losses(make) == pytest.approx(exact, rel=0.002)


def test_a_lost_master_would_be_seen(exact: float) -> None:
    assert last_losses(partial(torch.optim.AdamW, lr=LR)) > 1.003 * exact
