"""Several NCCL ranks, on as many GPUs as there are, or all on one: the programs of `order_programs`, a part of the
ranks, groups that are bound to their GPU, and a rank that stays away.

One GPU takes several ranks from NCCL 2.30 on. They take turns on it. Every call has a limit: ranks that hang are ended,
and the failure has where each of them was, with the end of its stderr, which names the program.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chosen_programs import WIDTH, few_objects, of_ranks
from harness import RankFailure
from nccl_ranks import on_nccl_ranks
from order_programs import (
    SIDE,
    OrderProgram,
    Run,
    Streams,
    Trained,
    make_inputs,
    make_model,
    train,
    wrong,
)
from places import ON_GPU

pytestmark = pytest.mark.gpu

BOUND = [False, True] if ON_GPU else [False]  # no group of gloo's is
LIMIT = 110  # seconds for the programs of one test
AWAY_SECONDS = 10 if ON_GPU else 3  # of the group of which a rank stays away


_on_ranks = partial(on_nccl_ranks, timeout=LIMIT)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


def _train_all(rank: int, world_size: int, programs: Sequence[OrderProgram], group: Any = None) -> list[Trained]:
    trained = []
    few_objects()
    for program in programs:
        print(f"began: {program}", file=sys.stderr, flush=True)
        trained.append(train(rank, world_size, program, _device(), group))
    return trained


def _assert_right(of_ranks: Sequence[Sequence[Trained]], programs: Sequence[OrderProgram]) -> None:
    found = wrong(of_ranks, programs)
    assert not found, "\n".join(found)


def _by_muon(rank: int, world_size: int, stage: int) -> list[torch.Tensor]:
    """Weights after a few steps: matrices by Muon, the rest by AdamW, in one optimizer."""
    import zero_optim
    from zero_optim import rules

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(72, 72) for _ in range(3))).to(_device(), torch.bfloat16)
    if stage == 3:
        zero_optim.shard_module(model, (torch.nn.Linear,))
    matrices, others = zero_optim.ShardedMuon.split(model)
    groups = [{"params": matrices}, {"params": others, "rule": rules.AdamW(lr=1e-2)}]
    opt = zero_optim.ShardedMuon(groups, lr=0.02, stage=stage, max_grad_norm=1.0)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(8, 72, generator=generator).to(_device(), torch.bfloat16)
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    with zero_optim.gather_parameters(model):
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def test_muon_at_stage_3_has_the_bits_of_stage_2() -> None:
    for_stages = [_on_ranks(2, _by_muon, stage)[0] for stage in (2, 3)]
    assert all(map(torch.equal, *for_stages))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_programs(world_size: int, stage: int) -> None:
    """On two ranks several optimizers and a backward that raises on one rank are among those of every stage."""
    programs = [program for program in of_ranks(world_size) if program.stage == stage]
    _assert_right(_on_ranks(world_size, _train_all, programs), programs)


def _after_the_first_step(rank: int, world_size: int, program: OrderProgram) -> tuple[bool, int, int]:
    """Whether the buckets have another order than before, how many are being gathered, and how many there are."""
    model = make_model(program).to(_device())
    run = Run(program, model, rank, world_size, make_inputs(program, rank, _device()), Streams(_device()), None)
    buckets = run.optimizers[0].engine.reducer.buckets
    before = [[id(parameter) for parameter in bucket.params] for bucket in buckets]
    run.step(0)
    buckets = run.optimizers[0].engine.reducer.buckets
    in_flight = sum(bucket.unsharding.pending is not None for bucket in buckets)
    moved = before != [[id(parameter) for parameter in bucket.params] for bucket in buckets]
    run.close()
    return moved, in_flight, len(buckets)


@pytest.mark.parametrize(("what", "moves"), [("relaid", True), ("overlapped", False)])
def test_programs_do_what_they_say(what: str, moves: bool) -> None:
    for moved, in_flight, buckets in _on_ranks(2, _after_the_first_step, OrderProgram(2, what, width=WIDTH)):
        assert moved == moves
        assert in_flight == buckets > 4


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_groups_that_are_bound_to_their_gpu(stage: int) -> None:
    """`init_process_group(device_id=...)`: the groups that the library makes are split from the default one."""
    programs = [OrderProgram(stage, what, trained_on=SIDE, width=WIDTH) for what in ("plain", "two optimizers")]
    _assert_right(_on_ranks(2, _train_all, programs, bound=True), programs)


def _in_a_part(rank: int, world_size: int, programs: Sequence[OrderProgram]) -> list[Trained]:
    """Ranks 0 and 2 train together; rank 1 trains alone, meanwhile. Every rank makes every group, as torch asks."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    return _train_all(rank // 2, 2 - rank % 2, programs, groups[rank % 2])


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("bound", BOUND, ids=["", "bound"][: len(BOUND)])
def test_a_part_of_the_ranks(bound: bool, stage: int) -> None:
    """Where groups are bound to their GPU, torch makes a new one by `ncclCommSplit`, which waits for every rank of the
    default group. A group that only its own ranks make would then wait in vain, until the limit."""
    programs = [OrderProgram(stage, what, width=WIDTH) for what in ("plain", "two optimizers")]
    zero, one, two = _on_ranks(3, _in_a_part, programs, bound=bound)
    _assert_right([zero, two], programs)
    _assert_right([one], programs)


def _stays_away(rank: int, world_size: int) -> None:
    """After a step of both ranks rank 0 makes another alone, and reads what it gives. Rank 1 waits until it is gone."""
    import zero_optim

    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timedelta(seconds=AWAY_SECONDS))
    model = torch.nn.Linear(WIDTH, WIDTH).to(_device())
    opt = zero_optim.ShardedAdamW(model.parameters(), process_group=group)

    def step() -> float:
        model(torch.ones(1, WIDTH, device=_device())).sum().backward()
        opt.step()
        opt.zero_grad()
        return float(model.bias.sum())

    step()
    try:
        step() if rank == 0 else store.wait(["rank 0 has gone"], timedelta(seconds=LIMIT))
    finally:
        if rank == 0:
            store.set("rank 0 has gone", "1")


def test_a_rank_that_stays_away_is_told() -> None:
    """Under gloo the waiting rank raises. Under NCCL the host does not wait, so torch's watchdog ends the process."""
    with pytest.raises(RankFailure) as failure:
        _on_ranks(2, _stays_away)
    told = str(failure.value)
    assert "rank 0" in told
    if ON_GPU:
        assert "died" in told and ("timeout" in told.lower() or "timed out" in told.lower()), told
    else:
        assert "CollectiveError" in told, told
