"""A small transformer in bf16 on two ranks follows the loss curve of a single-process loop with fp32 masters."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from cells import slow
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor, nn
from torch.nn import functional as F
from training_cases import maybe_no_sync

VOCABULARY, WIDTH, HEADS, WINDOW, BATCH = 24, 32, 2, 32, 8
STEPS, LR = 40, 1e-2


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, window, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, window, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, window, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class _Model(nn.Module):
    """About 28 000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.position = nn.Embedding(WINDOW, WIDTH)
            self.blocks = nn.Sequential(_Block(), _Block())
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.to(torch.bfloat16)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        x = self.norm(self.blocks(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(rank: int, step: int, micro: int) -> Tensor:
    """Walks of a permutation of the vocabulary, from random starts, with a random token now and then."""
    generator = torch.Generator().manual_seed(10_000 * rank + 10 * step + micro)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    walk = (start + 7 * torch.arange(WINDOW + 1)) % VOCABULARY
    noise = torch.rand(walk.shape, generator=generator) < 0.05
    return torch.where(noise, torch.randint(VOCABULARY, walk.shape, generator=generator), walk)


def _hyper(step: int) -> float:
    """The learning rate: warm-up over five steps, then a cosine."""
    return LR * min((step + 1) / 5, 0.5 * (1 + math.cos(math.pi * step / STEPS)) + 0.05)


def _train(rank: int, world_size: int, stage: int, dtype: torch.dtype | None, micro: int) -> list[float]:
    """This rank's loss at each step."""
    import zero_optim

    model = _Model()
    opt = zero_optim.ShardedAdamW(
        model.named_parameters(), lr=LR, stage=stage, bucket_cap_mb=0.02, grad_reduce_dtype=dtype
    )
    losses = []
    for step in range(STEPS):
        opt.param_groups[0]["lr"] = _hyper(step)
        total = 0.0
        for index in range(micro):
            with maybe_no_sync(opt, index < micro - 1):
                loss = model.loss(_tokens(rank, step, index)) / micro
                loss.backward()
            total += float(loss.detach())
        opt.step()
        opt.zero_grad()
        losses.append(total)
    opt.close()
    return losses


def _reference(world_size: int, dtype: torch.dtype | None, micro: int) -> list[list[float]]:
    """The losses of every rank's batches, by step, in one process."""
    model = _Model()
    params = list(model.parameters())
    oracle = MasterAdamW(params)
    curve = []
    for step in range(STEPS):
        oracle.hypers = [Hyper(lr=_hyper(step))] * len(params)
        local, losses = [], []
        for rank in range(world_size):
            model.zero_grad()
            total = 0.0
            for index in range(micro):
                loss = model.loss(_tokens(rank, step, index)) / micro
                loss.backward()
                total += float(loss.detach())
            local.append([p.grad for p in params])
            losses.append(total)
        oracle.step(averages(local, dtype))
        with torch.no_grad():
            for p, value in zip(params, oracle.params, strict=True):
                p.copy_(value)
        curve.append(losses)
    return curve


def _reference_on_a_rank(
    rank: int, world_size: int, ranks: int, dtype: torch.dtype | None, micro: int
) -> list[list[float]]:
    return _reference(ranks, dtype, micro)  # in a worker, so that the number of threads is the same


@functools.cache
def _trained(stage: int, dtype: torch.dtype | None, micro: int) -> list[list[float]]:
    return run_ranks(2, _train, stage, dtype, micro)


@pytest.mark.parametrize(
    ("dtype", "micro", "stages"),
    [
        (None, 1, (1, 2)),
        (torch.float32, 2, (0,)),
        pytest.param(None, 1, (0,), marks=slow),
        pytest.param(torch.float32, 2, (1, 2), marks=slow),
    ],
)
def test_the_loss_curve_is_the_single_process_loops(dtype, micro, stages):
    (curve,) = run_ranks(1, _reference_on_a_rank, 2, dtype, micro)
    first, last = sum(curve[0]) / 2, sum(map(sum, curve[-5:])) / 10
    assert first > 2.5, "it starts near the entropy of the vocabulary"
    assert last < 0.5 * first, "and learns"
    for stage in stages:
        for rank, losses in enumerate(_trained(stage, dtype, micro)):
            # Same gradients, same update: what is left is how a matrix product rounds at another memory address.
            assert losses == pytest.approx([step[rank] for step in curve], abs=5e-3)


def test_stages_1_and_2_train_to_the_same_bits():
    assert _trained(1, None, 1) == _trained(2, None, 1)
