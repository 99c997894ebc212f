"""Reductions in two legs on simulated GPUs: the bits of gloo, no race, one order on all ranks; and a fault is seen."""

from __future__ import annotations

import pytest
import torch
from grid_cases import make_mesh, on_mesh
from harness import RankFailure, run_ranks
from sharded_cases import Net, Run, full_state, gathered, loss_of, make, tokens
from torch import Tensor
from training_cases import assert_bitwise, maybe_no_sync

from simulated_gpu import switch

RUNS = {
    "stage 1": Run(stage=1, micro=2),
    "stage 2, in tiny buckets": Run(stage=2, micro=2, options={"bucket_cap_mb": 0.002}),
    "stage 2, no_sync": Run(stage=2, micro=3, no_sync=True, dtype=torch.bfloat16),
    "stage 2, state on the host": Run(stage=2, micro=2, options={"state_offload": "cpu"}),
    "stage 3": Run(stage=3, micro=2, shard={"prefetch": 2}),
    "stage 3, kept by nodes": Run(stage=3, dtype=torch.bfloat16, shard={"reshard_after_forward": False}),
}


def _train(rank: int, world_size: int, name: str, fault: bool = False) -> list[Tensor]:
    from zero_optim.comm import sharding

    if fault:  # the second leg leaves without waiting for the first
        sharding.issue_behind = lambda first, second, device: second()
    chosen = switch.chosen()
    device = torch.device("cuda", 0) if chosen is not None and chosen.kind == "streams" else torch.device("cpu")
    torch.manual_seed(0)
    run = RUNS[name]
    model, opt = make(on_mesh(run, make_mesh(2, 2)), Net().to(device))
    for step in range(3):
        for micro in range(run.micro):
            with maybe_no_sync(opt, run.no_sync and micro < run.micro - 1):
                loss_of(model, tokens(rank, step, micro).to(device)).backward()
        opt.step()
        opt.zero_grad()
    values = [*gathered(model).values(), *(tensor for state in full_state(opt).values() for tensor in state.values())]
    opt.close()
    return [value.cpu() for value in values]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("simulated", ["streams:never", "held+bound"])
def test_the_bits_of_gloo_without_a_race(device: None, name: str, simulated: str) -> None:
    expected = run_ranks(4, _train, name)[0]
    for rank, values in enumerate(run_ranks(4, _train, name, simulated=simulated)):
        assert_bitwise(values, expected, f"rank {rank}")


def test_a_second_leg_that_does_not_wait_is_seen(device: None) -> None:
    with pytest.raises(RankFailure, match="RaceFound"):
        run_ranks(4, _train, "stage 2, in tiny buckets", True, simulated="streams:never")
