"""``zero_optim.integrations.ddp``: a loop that is written around DDP, with nothing but the import changed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import zero_optim
from client_cases import EPS, assert_like_adamw, weights
from harness import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from zero_optim.errors import ZeroOptimError
from zero_optim.integrations.ddp import DistributedDataParallel

LR, STEPS, MICRO_BATCHES = 1e-2, 4, 3


def _make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


def _batch(rank: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((rank * 100 + step) * 10 + micro_batch)
    x = torch.randn(8, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def _loop(model: Any, optimizer: Any, rank: int, by_attribute: bool) -> None:
    """As scripts for DDP have it, in one of two ways to reduce once a step."""
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            if by_attribute:
                model.require_backward_grad_sync = last
            with nullcontext() if last or by_attribute else model.no_sync():
                x, y = _batch(rank, step, micro_batch)
                (F.cross_entropy(model(x), y) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train(rank: int, world_size: int, stage: int, by_attribute: bool, wrapped_first: bool) -> dict[str, Any]:
    module = _make_model()
    if stage == 3:
        zero_optim.shard_module(module, (nn.Linear,))
    model: Any = DistributedDataParallel(module, device_ids=None, find_unused_parameters=True)
    parameters = model.parameters() if wrapped_first else module.parameters()
    optimizer = zero_optim.ShardedAdamW(parameters, lr=LR, eps=EPS, stage=None if stage == 3 else stage)
    _loop(model, optimizer, rank, by_attribute)
    calls = {kind: of["calls"] for kind, of in optimizer.stats()["collectives"].items()}
    found = {"weights": weights(model.module), "keys": list(model.state_dict()), "calls": calls}
    found["buckets"] = optimizer.stats()["buckets"]
    optimizer.close()
    return found


def _train_torch(rank: int, world_size: int) -> dict[str, Any]:
    model = TorchDDP(_make_model())
    _loop(model, torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS), rank, by_attribute=False)
    return {"weights": weights(model.module), "keys": list(model.state_dict())}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return run_ranks(2, _train_torch)[0]


@pytest.mark.parametrize("by_attribute", [False, True], ids=["no_sync", "require_backward_grad_sync"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_as_ddp(stage: int, by_attribute: bool, expected: dict[str, Any]) -> None:
    """And reduces each bucket once a step, whatever the accumulation."""
    for found in run_ranks(2, _train, stage, by_attribute, stage % 2 == 0):
        assert_like_adamw(found["weights"], expected["weights"], LR, STEPS)
        assert found["keys"] == expected["keys"]
        reduction = "all_reduce" if stage == 0 else "reduce_scatter"
        assert found["calls"][reduction] == STEPS * found["buckets"]


def _no_optimizer(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(_make_model())
    x, _ = _batch(rank, 0, 0)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    DistributedDataParallel(_make_model().requires_grad_(False))(x)
    with pytest.raises(ZeroOptimError) as caught:
        model.train()(x)
    zero_optim.ShardedAdamW(_make_model().parameters())  # of others
    optimizer = zero_optim.ShardedAdamW(model.parameters())
    model(x)
    optimizer.close()
    return str(caught.value)


def test_a_model_that_nobody_averages_is_refused() -> None:
    assert all("no ShardedAdamW has the parameters" in text for text in run_ranks(2, _no_optimizer))


def test_arguments() -> None:
    model = DistributedDataParallel(_make_model(), [0], broadcast_buffers=False, static_graph=True)
    assert model(torch.zeros(1, 6)).shape == (1, 3)  # one rank needs no optimizer
    with pytest.raises(ValueError, match="sync_buffers"):
        DistributedDataParallel(_make_model(), broadcast_buffers=True)
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        DistributedDataParallel(_make_model(), bucket_cap_mb=25)
