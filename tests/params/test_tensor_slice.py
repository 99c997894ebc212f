"""What a tensor-parallel rank has of a parameter, as DTensors say it."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from torch import nn
from zero_optim.params.storage_order import Cut
from zero_optim.params.tensor_slice import TensorSlice

SHAPES = ((5, 4), (4, 5), (1, 3), (3, 1), (6,), (2, 3, 5))


def _slices(rank: int, world_size: int) -> None:
    """Every dimension of every shape, even slices, uneven ones and empty ones, as torch cuts them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from zero_optim.params.tensor_slice import (
        is_cut,
        local_gradient,
        local_of,
        room_of,
        shown_as,
        slice_of,
    )

    mesh = init_device_mesh("cpu", (world_size,))
    for shape in SHAPES:
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for dim in range(-1, len(shape)):
            parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
            own = slice_of(parameter)
            assert own is not None and own.cut is not None and is_cut(parameter)
            assert torch.equal(own.of(whole), local_of(parameter))
            assert own.local_shape == tuple(local_of(parameter).shape)
            slices = [own.on(other).of(whole) for other in range(world_size)]
            assert torch.equal(torch.cat(slices, own.dim), whole)
            assert own.start == sum(one.numel() for one in slices[:rank])
            assert room_of(parameter) == max(one.numel() for one in slices)
            assert (own.arranged is None) == (own.cut.dim == 0)
            shown = shown_as(parameter, local_of(parameter).detach().clone())
            assert (shown.shape, shown.stride(), shown.placements) == (
                parameter.shape,
                parameter.stride(),
                parameter.placements,
            )
            assert torch.equal(shown.full_tensor(), whole)
        alike = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
        own = slice_of(alike)
        assert own == TensorSlice(shape, None, world_size, rank) and not is_cut(alike)
        assert (own.start, own.local_shape, room_of(alike)) == (0, shape, whole.numel())
        term = shown_as(alike, whole, term=True)
        assert local_gradient(alike, term)[1] and not local_gradient(alike, alike.detach())[1]
        placed_otherwise = distribute_tensor(whole, mesh, [Shard(0)])
        grad, is_term = local_gradient(alike, placed_otherwise)
        assert torch.equal(grad, whole) and not is_term


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_are_those_that_torch_cuts(ranks):
    run_ranks(ranks, _slices)


def test_a_plain_parameter_is_no_slice():
    from zero_optim.params.tensor_slice import is_cut, local_of, room_of, shown_as, slice_of, whole_of

    plain = nn.Parameter(torch.ones(3, 2))
    assert slice_of(plain) is None and not is_cut(plain) and room_of(plain) == 6
    assert local_of(plain) is plain and whole_of(plain) is plain and shown_as(plain, plain.data) is not None


def test_a_cut_knows_its_slices():
    cut = Cut(1, (3, 2, 0))
    assert [cut.start(number) for number in range(3)] == [0, 3, 5]
    assert [cut.shape((4, 5), number) for number in range(3)] == [(4, 3), (4, 2), (4, 0)]
