"""Ranks that wait for each other in vain, in different groups: they are told within seconds, not at the time-out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import nn
from training_cases import Planned, raise_in_backward


def _another_optimizer_first(rank: int, world_size: int, **options: int) -> tuple[str, str, float]:
    """Rank 1 raises before its backward comes to the sharded model; rank 0 waits there. Then each goes on with the
    step of another optimizer, which the documents forbid. Afterwards a new optimizer trains on. The model's own has
    a step refused where its backward was cut short."""
    from zero_optim.comm import standstill

    standstill.SECONDS, seconds = 0.2, standstill.SECONDS
    torch.manual_seed(0)
    sharded, plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
    zero_optim.shard_module(sharded, units=(nn.Linear,), **options)
    of_sharded = zero_optim.ShardedAdamW(sharded.parameters(), lr=0.1)
    of_plain = zero_optim.ShardedAdamW(plain.parameters(), lr=0.1)
    text = ""
    try:
        y = sharded(torch.ones(1, 8)).sum()
        (raise_in_backward(y) if rank == 1 else y).backward()
        of_plain.step()
    except Planned:
        try:
            of_plain.step()
        except zero_optim.ZeroOptimError as error:
            text = f"{type(error).__name__}: {error}"
    except zero_optim.ZeroOptimError as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        standstill.SECONDS = seconds
    refused = ""
    if rank == 0:
        try:
            of_sharded.step()
        except zero_optim.RankMismatchError as error:
            refused = str(error)
    of_plain.close()
    again = zero_optim.ShardedAdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 8)).sum().backward()
    again.step()
    return text, refused, float(plain.weight.detach().sum())


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, {}), (4, {"reshard_after_forward": 2})], ids=["one group", "within a node"]
)
def test_waiting_in_different_groups(ranks, options):
    """Of four ranks, rank 0 alone waits in the sharded model: for the other one of its node."""
    results = run_ranks(ranks, partial(_another_optimizer_first, **options), timeout=60)
    for text, _, _ in results:
        assert text.startswith("RankMismatchError: the ranks wait for each other, in different places"), text
        assert "all_gather of a sharded model, rank 1 in " in text
        assert "of an optimizer" in text
    assert results[0][1].startswith("an earlier error has parted the ranks")
    assert len({total for *_, total in results}) == 1
