"""The order in which a tensor's elements are counted: slice by slice, and within a slice as it lies in memory.

A contiguous tensor has its last dimension innermost. A channels_last tensor of shape [N, C, H, W] lies in memory as a
contiguous one of [N, H, W, C], and its slot keeps that order, which convolutions want. An order names the dimensions in
memory, outermost first. Dimension 0 is outermost in every order, so rows of it are one flat range in each.

A tensor-parallel slice along another dimension than 0 is no flat range of the whole tensor. Two slices of a [2, 4]::

    whole            0 1 2 3          slices, one after another     0 1 | 4 5
                     4 5 6 7                                        2 3 | 6 7      (elements, by their numbers there)

Slices along dimension 0 follow each other in whole order anyway: then there is no ``Cut``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

StorageOrder = tuple[int, ...] | None
"""None: the dimensions as they are, which is contiguous."""

CHANNELS_LAST: dict[int, tuple[torch.memory_format, tuple[int, ...]]] = {
    4: (torch.channels_last, (0, 2, 3, 1)),
    5: (torch.channels_last_3d, (0, 2, 3, 4, 1)),
}
"""The memory format and its order, by number of dimensions."""


def storage_order(tensor: Tensor) -> StorageOrder:
    """Read the order of ``tensor``. None also for a tensor that is neither contiguous nor channels_last: no slot keeps
    its strides.

    Where a tensor is both, as the weight of a 1x1 convolution may be, its strides decide.
    """
    if tensor.dim() not in CHANNELS_LAST:
        return None
    memory_format, order = CHANNELS_LAST[tensor.dim()]
    if tensor.stride() == strides_of(tensor.shape, None) or not tensor.is_contiguous(memory_format=memory_format):
        return None
    return order


def as_stored(tensor: Tensor, order: StorageOrder) -> Tensor:
    """View ``tensor`` with its dimensions in ``order``: contiguous where the tensor lies so."""
    return tensor if order is None else tensor.permute(order)


def flat_of(tensor: Tensor, order: StorageOrder) -> Tensor:
    """Flatten ``tensor`` to [numel], in ``order``: a view where the tensor lies so, else a copy."""
    return as_stored(tensor, order).reshape(-1)


def view_of(flat: Tensor, shape: Sequence[int], order: StorageOrder) -> Tensor:
    """View ``flat`` [numel], in which elements lie in ``order``, as a tensor of ``shape``."""
    if order is None:
        return flat.view(tuple(shape))
    return flat.view(stored_dims(shape, order)).permute(tensor_dims(range(len(order)), order))


def strides_of(shape: Sequence[int], order: StorageOrder) -> tuple[int, ...]:
    """Strides of a tensor of ``shape`` that lies in ``order``."""
    stored = [max(size, 1) for size in stored_dims(shape, order)]
    return tensor_dims([prod(stored[dim + 1 :]) for dim in range(len(stored))], order)


def stored_dims(values: Sequence[int], order: StorageOrder) -> tuple[int, ...]:
    """Reorder values, one a dimension, such as a shape, from the tensor's dimensions to those in memory."""
    return tuple(values) if order is None else tuple(values[dim] for dim in order)


def tensor_dims(values: Sequence[int], order: StorageOrder) -> tuple[int, ...]:
    """Reorder values, one a dimension, from the dimensions in memory to the tensor's."""
    return tuple(values) if order is None else tuple(values[order.index(dim)] for dim in range(len(order)))


def described(tensor: Tensor) -> str:
    """Describe ``tensor``, as in ``"(16, 8, 3, 3) torch.float32, channels_last"``."""
    memory_format = f", {CHANNELS_LAST[tensor.dim()][0]}" if storage_order(tensor) else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{memory_format.replace('torch.', '')}"


# -- slice by slice ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """A tensor's cut into slices: along ``dim``, of ``sizes`` rows each, in the order of the ranks."""

    dim: int
    sizes: tuple[int, ...]

    def start(self, number: int) -> int:
        """Count the rows of the slices before number ``number``."""
        return sum(self.sizes[:number])

    def shape(self, of: Sequence[int], number: int) -> tuple[int, ...]:
        """The shape of one slice of a tensor of shape ``of``."""
        return (*of[: self.dim], self.sizes[number], *of[self.dim + 1 :])


def slice_counts(shape: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Elements of each slice of a tensor of ``shape``."""
    return (prod(shape),) if cut is None else tuple(prod(cut.shape(shape, n)) for n in range(len(cut.sizes)))
