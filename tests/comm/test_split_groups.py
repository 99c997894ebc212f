"""Groups of our own after ``init_process_group(device_id=...)``, where torch splits the communicator of all ranks: only
the ranks that have an optimizer in common make them. gloo splits nothing, so ``dist.new_group`` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from sharded_cases import Block, Net, loss_of, tokens
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from training_cases import assert_bitwise, copies, linear_backward, make_gradients, make_parameters
from zero_optim.comm import transport
from zero_optim.comm.handle import Handle

SHAPES = ((17, 9), (300,))
GPU = torch.device("cuda", 0)


class SplitHangs(Exception):
    """With NCCL this call would never return: it waits for ranks that do not make it."""


_new_group = dist.new_group


def _bound_new_group(ranks: Sequence[int] | None = None, *given: Any, **options: Any) -> Any:
    """Where the default group is bound, all ranks of the job split its communicator."""
    some = ranks is not None and len(ranks) < dist.get_world_size()
    if some and options.get("use_local_synchronization") and dist.group.WORLD.bound_device_id is not None:
        raise SplitHangs(f"new_group({list(ranks)}) splits the communicator of all ranks, and only these call it")
    return _new_group(ranks, *given, **options)


def _barrier(gloo: transport.Transport, group: dist.ProcessGroup) -> Handle:
    """torch's is on the device that is bound, which is not there."""
    return gloo.all_reduce(torch.zeros(1), group)


def _bound(rank: int, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    """``body`` with a device that is bound to the default group, as ``init_process_group`` binds it."""
    dist.group.WORLD.bound_device_id = GPU
    with (
        mock.patch.object(dist, "new_group", _bound_new_group),
        mock.patch.object(dist.distributed_c10d, "_get_split_source", lambda group: None),  # gloo has none
        mock.patch.object(transport.GlooTransport, "barrier", _barrier),
    ):
        result = body(rank, world_size, *args)
    assert dist.group.WORLD.bound_device_id == GPU
    return result


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


def _mesh_of_some_ranks(rank: int, world_size: int, kind: str) -> list[Tensor]:
    """Four of five ranks train on a mesh, as a stage of a pipeline does, and its ranks alone make its groups."""
    import zero_optim

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    if rank == 4:
        return []
    params = make_parameters(SHAPES, seed=1)
    if kind == "slices":
        for parameter in params:
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    by_kind = {"grid": {"mesh": mesh}, "slices": {"mesh": mesh["replicate"], "tensor_parallel": mesh["shard"]}}
    opt = zero_optim.ShardedAdamW(params, lr=1e-2, **by_kind[kind])
    for step in range(2):
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params)


@pytest.mark.parametrize("kind", ["grid", "slices"])
def test_some_ranks_make_the_groups_of_a_mesh(kind: str) -> None:
    bound = run_ranks(5, _bound, _mesh_of_some_ranks, kind)
    plain = run_ranks(5, _mesh_of_some_ranks, kind)
    for rank in range(4):
        assert_bitwise(bound[rank], plain[rank], f"rank {rank}")


def _cannot_be_made(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    with mock.patch.object(dist, "new_group", mock.Mock(side_effect=RuntimeError("no such group"))):
        if rank < 2:
            with pytest.raises(RuntimeError, match="no such group"):
                transport.new_group_of([0, 1], group, "own")


def test_the_device_is_bound_again_after_an_error() -> None:
    run_ranks(3, _bound, _cannot_be_made)
