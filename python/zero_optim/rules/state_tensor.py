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
    PARAMETER = enum.auto()  # a copy of it. Where the parameter has the dtype itself there is none: it is its own
    AVERAGE = enum.auto()  # a copy of it, always: an average of what it becomes


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a shard's state: flat, along the shard."""

    name: str
    begins: Begins = Begins.ZERO
    dtype: torch.dtype = torch.float32
    per: Per = Per.ELEMENT

    def span(self, offset: int, numel: int) -> tuple[int, int]:
        """Start and length of the values of ``numel`` elements from ``offset`` on. Both are at rows' starts."""
        return (offset, numel) if self.per is Per.ELEMENT else (offset // ROW, -(-numel // ROW))

    def shape(self, parameter: Sequence[int], numel: int) -> tuple[int, ...]:
        """Shape of the state of a whole parameter, of that shape and so many elements."""
        return tuple(parameter) if self.per is Per.ELEMENT else (-(-numel // ROW),)

    def order(self, parameter: StorageOrder) -> StorageOrder:
        """Give the order in which state lies whose parameter lies in the order ``parameter``.

        Rows have no dimensions of their own. But which elements are one depends on the parameter's order: what was
        kept for rows in one order means nothing in another, and whoever loads it refuses it.
        """
        return parameter if self.per is Per.ELEMENT else None
