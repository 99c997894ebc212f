"""Groups of our own where torch splits communicators: only the ranks that share an optimizer make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from sharded_cases import Block, Net, loss_of, tokens
from torch import Tensor
from training_cases import assert_bitwise, copies, linear_backward, make_gradients, make_parameters

SHAPES = ((17, 9), (300,))


def _two_optimizers_on_some_ranks(rank: int, world_size: int, members: tuple[int, ...]) -> list[Tensor]:
    """The second one needs a process group of its own, and the other ranks do nothing."""
    import zero_optim

    group = dist.new_group(list(members))
    if rank not in members:
        return []
    params = [make_parameters(SHAPES, seed=seed) for seed in (1, 2)]
    optimizers = [zero_optim.ShardedAdamW(of, lr=1e-2, process_group=group) for of in params]
    for step in range(2):
        for of, opt in zip(params, optimizers, strict=True):
            linear_backward(of, make_gradients(of, rank, step))
            opt.step()
            opt.zero_grad()
    for opt in optimizers:
        opt.close()
    return copies(params[0] + params[1])


@pytest.mark.parametrize("members", [(0, 1), (1, 2), (0, 2)])
def test_some_ranks_make_their_own_group(members: tuple[int, ...]) -> None:
    bound = run_ranks(3, _two_optimizers_on_some_ranks, members, simulated="held+bound")
    plain = run_ranks(3, _two_optimizers_on_some_ranks, members, simulated="")
    for rank in members:
        assert_bitwise(bound[rank], plain[rank], f"rank {rank}")


def _nodes_of_some_ranks(rank: int, world_size: int) -> list[float]:
    """Four of five ranks shard a model, and each two of them keep half of a unit."""
    import zero_optim

    group = dist.new_group([0, 1, 2, 3])
    if rank == 4:
        return []
    torch.manual_seed(0)
    model = zero_optim.shard_module(Net(), (Block,), process_group=group, reshard_after_forward=2)
    opt = zero_optim.ShardedAdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    opt.close()
    return losses


def test_some_ranks_make_groups_of_nodes() -> None:
    assert run_ranks(5, _nodes_of_some_ranks, simulated="held+bound") == run_ranks(
        5, _nodes_of_some_ranks, simulated=""
    )


def _groups_as_torch_makes_them(rank: int, world_size: int) -> None:
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)


def test_a_group_that_only_its_ranks_make_would_hang() -> None:
    """With a device bound, torch splits the communicator of all ranks in ``new_group``."""
    with pytest.raises(RankFailure, match="splits the communicator of all ranks"):
        run_ranks(3, _groups_as_torch_makes_them, simulated="held+bound")


def _kinds_of_construction(rank: int, world_size: int) -> list[str]:
    import zero_optim
    from zero_optim.comm import transport

    zero_optim.ShardedAdamW(make_parameters(SHAPES), lr=1e-2).close()
    simulated: Any = transport.used()
    return [entry.kind for entry in simulated.issued]


def test_nccl_connects_in_the_constructor() -> None:
    """Its host waits for all ranks there, and in a backward one that has raised would not come."""
    for kinds in run_ranks(2, _kinds_of_construction, simulated="held"):
        assert kinds[kinds.index("reduce_scatter") :][:3] == ["reduce_scatter", "all_gather", "all_reduce"]
