"""``check_replicas`` and ``check_replicas_every``: a bit that differs between ranks is found, and no other thing is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import zero_optim
from cells import slow_where
from eventful_cases import local
from harness import run_ranks
from topology_cases import TOPOLOGIES
from torch import Tensor, nn
from training_cases import linear_loss, make_gradients, make_parameters
from zero_optim import ParameterError, RankMismatchError, ShardedAdamW, check_replicas

STEPS = 3

# -- every topology ----------------------------------------------------------------------------------------------------


def error_of(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except RankMismatchError as error:
        return str(error)
    return ""


def built(name: str, stage: int, **options: Any) -> tuple[Any, Any]:
    job = TOPOLOGIES[name].make(torch.float32)
    groups = [{"params": [*job.model.named_parameters()]}] if job.groups is None else job.groups
    if stage == 3:
        zero_optim.shard_module(job.model, job.units, **job.given)
        groups = [{"params": [*job.model.named_parameters()]}]
    return job, ShardedAdamW(groups, lr=1e-2, stage=stage, **job.given, **job.options, **options)


def held(opt: ShardedAdamW) -> dict[str, Tensor]:
    """The memory of this rank's part of each trained parameter, by its name."""
    found = {}
    for shard in opt.engine.states.shards:
        flat = shard.bucket.flat
        for parameter, piece, slot in zip(flat.params, flat.pieces, shard.bucket.layout.slots, strict=True):
            own = flat.shard.narrow(0, piece.in_shard, piece.numel) if flat.sharded else local(parameter).data.view(-1)
            found[opt.engine.parameters.name(slot.param)] = own
    return found


def drift(values: Tensor) -> None:
    """By one unit in the last place of the last element."""
    values[-1:].view(torch.int32).bitwise_xor_(1)


def drifted(rank: int, world_size: int, name: str, stage: int) -> list[tuple[str, bool, str, str]]:
    """Of each parameter of the last rank: whether another rank has it, and what both faces raise where it drifts."""
    job, opt = built(name, stage, check_replicas_every=1)
    for step in range(STEPS):
        job.backwards(opt, step, lambda loss: loss)
        opt.step()
        check_replicas(job.model)
        opt.zero_grad()
    found = []
    names = sorted(held(opt))
    replicated = {
        opt.engine.parameters.name(slot.param): shard.bucket.sharding.equals(cut=shard.bucket.flat.cut)[0] > 1
        for shard in opt.engine.states.shards
        for slot in shard.bucket.layout.slots
    }
    for number in range(max_over_ranks(len(names))):  # stages of a pipeline have others
        own = names[number % len(names)]
        if rank == world_size - 1:
            drift(held(opt)[own])
        by_call = error_of(check_replicas, opt)
        job.backwards(opt, STEPS, lambda loss: loss)
        by_step = error_of(opt.step)
        opt.zero_grad()
        if rank == world_size - 1:
            drift(held(opt)[own])
        found.append((own, replicated[own] and held(opt)[own].numel() > 0, by_call, by_step))
        assert error_of(check_replicas, opt) == "", "it was made undone"
    opt.close()
    return found


def max_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX)
    return int(total)


CELLS = [(name, stage) for name, of in TOPOLOGIES.items() for stage in of.stages]
FIRST = [(name, of.stages[number % len(of.stages)]) for number, (name, of) in enumerate(TOPOLOGIES.items())]


@pytest.mark.parametrize(("name", "stage"), slow_where(lambda cell: cell not in FIRST, CELLS))
def test_a_bit_of_one_rank_is_found_and_named_on_every_topology(name: str, stage: int) -> None:
    of_rank = run_ranks(TOPOLOGIES[name].ranks, drifted, name, stage, timeout=180)
    last = len(of_rank) - 1
    for rank, found in enumerate(of_rank):
        for (own, has_equals, by_call, by_step), (_, _, *there) in zip(of_rank[last], found, strict=True):
            for message in (by_call, by_step):
                if has_equals:
                    assert own in message and re.search(rf"\b{last}\b", message), f"{own}: {message}"
                else:
                    assert message == "", own
            assert all(bool(message) is has_equals for message in there), f"{own} on rank {rank}: {there}"
