"""The order in which a tensor lies in memory: told by its strides, and taken there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from zero_optim.params.storage_order import (
    StorageOrder,
    as_stored,
    flat_of,
    is_storage_order,
    storage_order,
    stored_dims,
    strides_of,
    tensor_dims,
    view_of,
)

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


@pytest.mark.parametrize(
    ("order", "dims", "known"),
    [(None, 3, True), (NHWC, 4, True), (NDHWC, 5, True), (NHWC, 5, False), ((1, 0, 2, 3), 4, False), ([], 0, False)],
)
def test_orders_that_there_are(order: Any, dims: int, known: bool) -> None:
    assert is_storage_order(order, dims) is known
