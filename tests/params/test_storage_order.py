"""The order in which a tensor lies in memory, and flat ranges of tensors that are counted slice by slice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from zero_optim.params.storage_order import (
    Cut,
    StorageOrder,
    as_stored,
    flat_of,
    storage_order,
    stored_dims,
    strides_of,
    tensor_dims,
    view_of,
)
from zero_optim.params.tensor_slice import Arrangement, read_arranged

NHWC, NDHWC = (0, 2, 3, 1), (0, 2, 3, 4, 1)
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def _filled(*shape: int) -> Tensor:
    size = torch.Size(shape)
    return torch.arange(size.numel(), dtype=torch.float32).view(size)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (_filled(16, 8, 3, 3), None),
        (_filled(16, 8, 3, 3).to(memory_format=LAST), NHWC),
        (_filled(4, 8, 2, 3, 3).to(memory_format=LAST_3D), NDHWC),
        (_filled(16, 8, 1, 1), None),
        (_filled(16, 8, 1, 1).to(memory_format=LAST), NHWC),
        (_filled(6, 1, 3, 3), None),
        (_filled(6, 1, 3, 3).to(memory_format=LAST), NHWC),
        (_filled(1, 1, 1, 1), None),
        (_filled(0, 8, 3, 3), None),
        (_filled(0, 8, 3, 3).to(memory_format=LAST), NHWC),
        (_filled(3, 8, 16, 3).permute(2, 1, 0, 3), None),  # dense, and in no format
        (_filled(16, 9, 3, 3).to(memory_format=LAST)[:, :8], None),  # with gaps
        (_filled(16, 1, 3, 3).expand(16, 8, 3, 3), None),
        (_filled(5, 7).t(), None),
        (_filled(9), None),
        (_filled(), None),
    ],
)
def test_what_keeps_its_strides(tensor: Tensor, order: StorageOrder) -> None:
    assert storage_order(tensor) == order
    again = view_of(flat_of(tensor, order), tensor.shape, order)
    assert torch.equal(again, tensor)
    kept = tensor if order else tensor.contiguous()
    assert again.stride() == strides_of(tensor.shape, order) == kept.stride()


def test_flat_is_a_view_of_what_lies_so() -> None:
    tensor = _filled(16, 8, 3, 3).to(memory_format=LAST)
    flat = flat_of(tensor, NHWC)
    assert flat.data_ptr() == tensor.data_ptr() and as_stored(tensor, NHWC).is_contiguous()
    assert torch.equal(flat, tensor.permute(0, 2, 3, 1).contiguous().view(-1))
    assert flat_of(tensor.contiguous(), NHWC).tolist() == flat.tolist()


def test_dimensions_there_and_back() -> None:
    assert stored_dims((2, 3, 4, 5), NHWC) == (2, 4, 5, 3)
    assert tensor_dims((2, 4, 5, 3), NHWC) == (2, 3, 4, 5)
    assert stored_dims((2, 3), None) == tensor_dims((2, 3), None) == (2, 3)


# -- slice by slice --------------------------------------------------------------------------------------------------


def _flat(whole: Tensor, arranged: Arrangement) -> Tensor:
    """The elements of ``whole``, in that order."""
    cut = arranged.cut
    slices = [whole] if cut is None else whole.split(cut.sizes, cut.dim)
    return torch.cat([flat_of(one, arranged.order) for one in slices])


def _check_every_range(shape: tuple[int, ...], here: Arrangement, there: Arrangement) -> None:
    whole = _filled(*shape)
    wanted, saved = _flat(whole, here), _flat(whole, there)

    def read(target: Tensor, start: int) -> None:
        target.copy_(saved[start : start + len(target)])

    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            target = torch.full((end - start,), -1.0)
            read_arranged(target, start, shape, (here, there), read)
            assert torch.equal(target, wanted[start:end])


@pytest.mark.parametrize("orders", [(None, NHWC), (NHWC, None), (NHWC, NHWC), (None, None)])
def test_every_range_is_read_in_another_order(orders: tuple[StorageOrder, StorageOrder]) -> None:
    here, there = orders
    _check_every_range((3, 2, 2, 2), Arrangement(here), Arrangement(there))


CUTS = (None, Cut(1, (2, 2)), Cut(1, (3, 1)), Cut(1, (1, 1, 1, 1)), Cut(1, (4, 0)), Cut(2, (2, 1)))


@pytest.mark.parametrize(("here", "there"), [*itertools.product(CUTS, CUTS)])
def test_every_range_is_read_from_other_slices(here: Cut | None, there: Cut | None) -> None:
    _check_every_range((2, 4, 3), Arrangement(cut=here), Arrangement(cut=there))


@pytest.mark.parametrize("orders", [*itertools.product((None, NHWC), repeat=2)])
def test_slices_in_another_memory_format(orders: tuple[StorageOrder, StorageOrder]) -> None:
    here, there = orders
    _check_every_range((2, 3, 2, 2), Arrangement(here, Cut(1, (2, 1))), Arrangement(there, Cut(1, (1, 2))))
    _check_every_range((2, 3, 2, 2), Arrangement(here, Cut(1, (2, 1))), Arrangement(there))


def _asked(start: int, length: int, shape: tuple[int, ...], ways: tuple[Arrangement, Arrangement]) -> list:
    asked: list = []
    read_arranged(torch.empty(length), start, shape, ways, lambda part, first: asked.append((first, len(part))))
    return asked


def test_little_more_than_the_range_is_read() -> None:
    ways = (Arrangement(NHWC), Arrangement())
    assert _asked(11, 10, (9, 2, 2, 2), ways) == [(8, 16)]  # the two slices of 8 that 11 to 21 lies in
    halves, quarters = Arrangement(cut=Cut(1, (4, 4))), Arrangement(cut=Cut(1, (2, 2, 2, 2)))
    # Of [5, 8], rows 1 and 2 of the second quarter lie in the first half alone, and of that, in 8 elements.
    assert _asked(12, 4, (5, 8), (quarters, halves)) == [(4, 8)]
    assert _asked(24, 4, (5, 8), (halves, quarters)) == [(22, 2), (32, 2)]
