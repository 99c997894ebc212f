"""Groups of our own after ``init_process_group(device_id=...)``, where torch splits communicators: only the ranks that
have an optimizer in common make them. gloo splits nothing, so ``dist.new_group`` and ``dist.split_group`` are replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from sharded_cases import Block, Net, loss_of, tokens
from torch import Tensor
from training_cases import assert_bitwise, copies, linear_backward, make_gradients, make_parameters
from zero_optim.comm import topology, transport

SHAPES = ((17, 9), (300,))


class SplitHangs(Exception):
    """With NCCL this call would never return: it waits for ranks that do not make it."""


_new_group = dist.new_group


def _bound_new_group(ranks: Sequence[int] | None = None, *given: Any, **options: Any) -> Any:
    """All ranks of the job split the default communicator."""
    if ranks is not None and len(ranks) < dist.get_world_size() and options.get("use_local_synchronization"):
        raise SplitHangs(f"new_group({list(ranks)}) splits the communicator of all ranks, and only these call it")
    return _new_group(ranks, *given, **options)


def _bound_split_group(
    parent_pg: dist.ProcessGroup, split_ranks: Sequence[Sequence[int]], timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """The ranks of ``parent_pg`` alone split its communicator. ``split_ranks``: as ``parent_pg`` numbers them."""
    ranks = dist.get_process_group_ranks(parent_pg)
    if sorted(itertools.chain(*split_ranks)) != list(range(len(ranks))):
        raise SplitHangs(f"split_group({split_ranks}) of a group of {len(ranks)} ranks leaves some out")
    own = next(part for part in split_ranks if ranks.index(dist.get_rank()) in part)
    return _new_group([ranks[rank] for rank in own], timeout, use_local_synchronization=True)


def _bound(rank: int, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    """``body`` as if a device were bound to the default group."""
    with (
        mock.patch.object(dist, "new_group", _bound_new_group),
        mock.patch.object(dist, "split_group", _bound_split_group),
        mock.patch.object(transport, "splits_communicators", lambda group: True),
        mock.patch.object(topology, "splits_communicators", lambda group: True),
    ):
        return body(rank, world_size, *args)


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
    bound = run_ranks(3, _bound, _two_optimizers_on_some_ranks, members)
    plain = run_ranks(3, _two_optimizers_on_some_ranks, members)
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
    assert run_ranks(5, _bound, _nodes_of_some_ranks) == run_ranks(5, _nodes_of_some_ranks)
