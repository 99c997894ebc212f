"""Collectives in two legs on simulated GPUs: the bits of gloo, no race, one order on all ranks; and a fault is seen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cells import slow_after
from grid_cases import make_mesh, on_mesh
from harness import RankFailure, run_ranks
from sharded_cases import Net, Run, full_state, gathered, loss_of, make, tokens
from simulated_gpu.switch import LATE, the_device
from torch import Tensor
from training_cases import assert_bitwise, maybe_no_sync

RUNS = {
    "stage 1": Run(stage=1, micro=2),
    "stage 2, in tiny buckets": Run(stage=2, micro=2, options={"bucket_cap_mb": 0.002}),
    "stage 2, state on the host": Run(stage=2, micro=2, options={"state_offload": "cpu"}),
    "stage 3, kept by nodes": Run(stage=3, dtype=torch.bfloat16, shard={"reshard_after_forward": False}),
    "state over all, attached": Run(stage=1, micro=2),
    "state over all, in tiny buckets": Run(stage=2, micro=2, options={"bucket_cap_mb": 0.002}),
    "state over all, stage 3": Run(stage=3, dtype=torch.bfloat16, micro=2),
    "state over all, stage 3 from the host": Run(
        stage=3, shard={"param_offload": "cpu"}, options={"state_offload": "paged", "device_budget": 0}
    ),
}


FAULTS = (
    "the second leg leaves without waiting for the first",
    "who waits for a reduction waits for its first leg alone",
    "a buffer is lent again while the second leg is in it",
)
FAULTS_OVER_ALL = {
    "the second leg leaves without waiting for the first": "state over all, in tiny buckets",
    "a unit is gathered before its shard is complete": "state over all, stage 3",
}


def _seed(fault: str) -> None:
    from zero_optim.comm import sharding
    from zero_optim.comm.handle import CommBuffers
    from zero_optim.params.flat_params import FlatParams

    if fault == "the second leg leaves without waiting for the first":
        sharding.issue_behind = lambda first, second, device: second()
    elif fault == "who waits for a reduction waits for its first leg alone":
        both = sharding.issue_behind
        sharding.issue_behind = lambda first, second, device: [both(first, second, device), first][1]
    elif fault == "a buffer is lent again while the second leg is in it":
        take = CommBuffers.take

        def lend(buffers: CommBuffers, *args: Any, **options: Any) -> Tensor:
            buffers._lent_for[:] = [None, None]
            return take(buffers, *args, **options)

        CommBuffers.take = lend
    elif fault == "a unit is gathered before its shard is complete":
        complete = FlatParams.complete_shard
        FlatParams.complete_shard = lambda flat, across: [complete(flat, across), flat.memory.arrivals.abandon()][0]


def _train(rank: int, world_size: int, name: str, fault: str = "") -> list[Tensor]:
    _seed(fault)
    device = the_device()
    torch.manual_seed(0)
    run = RUNS[name]
    given = {"state_over": "all"} if "over all" in name else {}
    model, opt = make(on_mesh(run, make_mesh(2, 2), **given), Net().to(device))
    if "attached" in name:
        opt.attach(model)
    for step in range(3):
        for micro in range(run.micro):
            with maybe_no_sync(opt, run.no_sync and micro < run.micro - 1):
                loss_of(model, tokens(rank, step, micro).to(device)).backward()
        opt.step()
        opt.zero_grad()
    values = [*gathered(model).values(), *(tensor for state in full_state(opt).values() for tensor in state.values())]
    opt.close()
    return [value.cpu() for value in values]


@functools.cache
def _by_gloo(name: str) -> list[Tensor]:
    return run_ranks(4, _train, name)[0]


@pytest.mark.parametrize("name", RUNS)
def test_the_bits_of_gloo_without_a_race(name: str) -> None:
    for rank, values in enumerate(run_ranks(4, _train, name, simulated=LATE)):
        assert_bitwise(values, _by_gloo(name), f"rank {rank}")


@pytest.mark.parametrize("fault", slow_after(1, FAULTS))
def test_a_wait_that_is_left_out_is_seen(fault: str) -> None:
    with pytest.raises(RankFailure, match="RaceFound"):
        run_ranks(4, _train, "stage 2, in tiny buckets", fault, simulated=LATE)


@pytest.mark.parametrize("fault", FAULTS_OVER_ALL)
def test_a_wait_that_state_over_all_leaves_out_is_seen(fault: str) -> None:
    with pytest.raises(RankFailure, match="RaceFound"):
        run_ranks(4, _train, FAULTS_OVER_ALL[fault], fault, simulated=LATE)
