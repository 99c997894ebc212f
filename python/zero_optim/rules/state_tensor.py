"""``StateTensor``: one tensor of the state that an update rule keeps, and how it lies along a shard."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_kernels import ROW

from ..params.storage_order import StorageOrder


class Per(enum.Enum):
    """The extent of one value of a state tensor."""

    ELEMENT = enum.auto()
    ROW = enum.auto()  # of 128 elements, as they lie in memory: a row is one parameter's alone, and no shard cuts it


class Begins(enum.Enum):
    """The content of a state tensor before the first update."""

    ZERO = enum.auto()
    PARAMETER = enum.auto()  # a copy of the parameter. If the parameter has the dtype itself there is no such tensor
    AVERAGE = enum.auto()  # a copy of the parameter, always: later the average of its values


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a shard's state: flat, along the shard."""

    name: str
    begins: Begins = Begins.ZERO
    dtype: torch.dtype = torch.float32
    per: Per = Per.ELEMENT

    def span(self, offset: int, numel: int) -> tuple[int, int]:
        """Find start and length of the values of ``numel`` elements from ``offset`` on, which begins a row."""
        return (offset, numel) if self.per is Per.ELEMENT else (offset // ROW, -(-numel // ROW))

    def shape(self, parameter: Sequence[int], numel: int) -> tuple[int, ...]:
        """Make the shape of the state of a whole parameter, whose shape is ``parameter``, with ``numel`` elements."""
        return tuple(parameter) if self.per is Per.ELEMENT else (-(-numel // ROW),)

    def order(self, parameter: StorageOrder) -> StorageOrder:
        """Give the order in which state lies whose parameter lies in the order ``parameter``.

        State per row has no dimensions. But the parameter's order decides which elements make a row: so values of rows
        in one order mean nothing in another, and loading refuses them.
        """
        return parameter if self.per is Per.ELEMENT else None
