"""``p.grad.local`` right after backward is this rank's part of the average: reading it waits for the reduction."""

from __future__ import annotations

import pytest
import torch
from cells import halves_of
from harness import run_ranks
from torch import Tensor, nn

NUMEL = 300_000  # large enough for a reduction to be under way when backward returns


def _read_at_once(rank: int, world_size: int, stage: int) -> list[tuple[Tensor, Tensor]]:
    """What each gradient's ``local`` is, and what it has to be."""
    import zero_optim

    params = [nn.Parameter(torch.ones(NUMEL)) for _ in range(4)]
    opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=0.5)
    pairs = []
    for step in range(3):
        ramps = [torch.arange(NUMEL) % 97 + number + 1.0 for number in range(len(params))]
        sum(((p * ramp).sum() * (rank + 1.0 + step) for p, ramp in zip(params, ramps, strict=True))).backward()
        average = sum(range(1, world_size + 1)) / world_size + step
        for p, ramp in zip(params, ramps, strict=True):
            local = p.grad.local.clone()
            pairs.append((local, average * ramp[p.grad.start : p.grad.start + len(local)]))
        opt.step()
        opt.zero_grad()
    opt.close()
    return pairs


@pytest.mark.parametrize(("simulated", "stage"), halves_of(["", "late"], [1, 2]))
def test_it_is_reduced_when_backward_returns(stage: int, simulated: str) -> None:
    by_rank = run_ranks(2, _read_at_once, stage, simulated=simulated)
    assert sum(len(local) for pairs in by_rank for local, _ in pairs) == 3 * 4 * NUMEL
    for pairs in by_rank:
        for local, expected in pairs:
            assert torch.equal(local, expected)
