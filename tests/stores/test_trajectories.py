"""Every store gives the bits of none: over stages, dtypes, budgets, accumulation, skipped and clipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cells import slow
from harness import run_ranks
from sharded_cases import Given, GivenNet

from stores.trajectories import RUNS, SHAPES, Store, Training, difference, train

DEVICE = Store()
STORES = (
    Store({"state_offload": "paged", "device_budget": 0}),
    Store({"state_offload": "paged", "device_budget": 6144}),  # one page, of the smaller ones
    Store({"state_offload": "paged", "device_budget": "1GB"}),
    Store({"state_offload": "cpu"}),
)
ON_HOST = {"param_offload": "cpu"}
TRAININGS = (
    Training(0, torch.float16, scaled=True),
    Training(0, torch.float32, micro=2),
    Training(1, torch.bfloat16, micro=2, no_sync=True),
    Training(1, torch.float32, options={"max_grad_norm": 1.0}),
    Training(2, torch.bfloat16),
    Training(2, torch.float16, micro=2, scaled=True),
    Training(2, torch.float32, options={"overlap_param_gather": True}),
    Training(3, torch.bfloat16, micro=2),
    Training(3, torch.float32, options={"max_grad_norm": 1.0}),
    Training(3, torch.float16, micro=3, no_sync=True, scaled=True),
)


def _id(training: Training) -> str:
    return f"stage{training.stage}-{str(training.dtype).removeprefix('torch.')}-{training.micro}"


SLOW = (1, 2, 4)  # of TRAININGS: what each has of two settings, one of the others has


def _on_ranks() -> list[Any]:
    """Stage 3 on one rank and on two, in ``make test`` in turn. Of the other stages every training is on one of them,
    in turn."""
    every = [
        pytest.param(ranks, training, marks=slow if turn in SLOW or ranks != 1 + turn % 2 else ())
        for turn, training in enumerate(TRAININGS)
        for ranks in (1, 2)
        if training.stage == 3 or ranks == 1 + turn % 2
    ]
    return every


@pytest.mark.parametrize(("ranks", "training"), _on_ranks(), ids=lambda of: _id(of) if isinstance(of, Training) else of)
def test_every_store_gives_the_bits_of_none(ranks: int, training: Training, tmp_path: Path) -> None:
    small = {"bucket_cap_mb": 0.002} if training.stage < 3 else {}
    training = Training(**{**vars(training), "options": {**training.options, **small}})
    stores = [*STORES, Store({"state_offload": f"nvme:{tmp_path}"})]
    if training.stage == 3:
        # Parameters off the device take turns: each store meets them in every dtype, on one number of ranks.
        turn, on_disk = ranks + TRAININGS.index(training), {"param_offload": f"nvme:{tmp_path}"}
        of_params = ({}, ON_HOST, on_disk)
        stores = [Store(store.options, of_params[(turn + at) % 3]) for at, store in enumerate(stores)]
        stores += [Store({}, ON_HOST), Store({}, on_disk)]
    stores.insert(0, DEVICE)
    for of_rank in run_ranks(ranks, train, training, stores):
        wrong = {
            store.name: found
            for store, of_store in zip(stores, of_rank, strict=True)
            if (found := difference(of_rank[0], of_store))
        }
        assert not wrong
        assert of_rank[0].stats["skipped_steps"] == 1
    assert not list(tmp_path.iterdir())


def _overflow_beside_an_unused_unit(rank: int, world_size: int, store: Store) -> int:
    import zero_optim

    model = GivenNet(RUNS, torch.bfloat16)
    zero_optim.shard_module(model, (Given,), **store.shard)
    opt = zero_optim.ShardedAdamW(model.named_parameters(), **store.options)
    grads: list[torch.Tensor | None] = [torch.full(shape, float("inf"), dtype=torch.bfloat16) for shape in SHAPES]
    grads[3:6] = [None] * 3  # all of the second unit
    model(grads).backward()
    opt.step()
    skipped = opt.stats()["skipped_steps"]
    opt.close()
    return skipped


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_skipped_step_looks_at_no_gradient_that_is_not_there(ranks: int) -> None:
    """Alone, a bucket of a unit that was not used had no memory for gradients. The update that skips read it."""
    for options in ({}, {"state_offload": "paged", "device_budget": 0}, {"state_offload": "cpu"}):
        assert run_ranks(ranks, _overflow_beside_an_unused_unit, Store(options, ON_HOST)) == [1] * ranks
