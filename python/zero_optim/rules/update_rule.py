"""An update rule: the state it keeps, the numbers it reads of a group, and the op that updates a shard.

Nothing outside a rule spells the name of a state tensor. Memory, state dicts, whole states, statistics and ``verify``
go by the rule's list. ``adamw`` is the rule there is. Another one is a file beside it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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


class ShardUpdate(NamedTuple):
    """The tensors that an update reads and writes.

    A tuple: a frozen dataclass takes four times as long to make, for every shard.

    Attributes:
        grad: [shard_numel] the reduced gradient, not unscaled yet.
        parameter: [shard_numel] in its own dtype.
        state: by name; along the shard.
        row_slot: [shard_numel / ROW] int32, the parameter index of each row; -1 for padding.
        hyper: [parameters, columns] fp32, a row of coefficients a parameter.
        grad_scale: [1] fp32, multiplies every gradient; None: nothing does.
        found_inf: [1] fp32; not 0: nothing is updated.
        marks: [parameters] int32, get 1 where a skipped gradient is not finite.
    """

    grad: Tensor
    parameter: Tensor
    state: Mapping[str, Tensor]
    row_slot: Tensor
    hyper: Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None
    marks: Tensor


class UpdateRule(Protocol):
    """An optimizer's arithmetic.

    Attributes:
        tensors: the state of a shard, in the order of state dicts. One of them begins as the parameter.
        coefficients: what a parameter group gives, in the order of ``read_group``.
        columns: of the table that ``update`` reads, one row a parameter; ``grad_factor`` among them, which multiplies
            the gradients of a parameter.
        decoupled: whether weight decay is apart from the gradient, as in AdamW, or in it, as in Adam.
    """

    @property
    def tensors(self) -> tuple[StateTensor, ...]: ...

    @property
    def coefficients(self) -> tuple[str, ...]: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def decoupled(self) -> bool: ...

    def read_group(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Numbers, or tensors of one element, in the order of ``coefficients``."""

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        """Make ``table`` [parameters, columns] fp32, on the device.

        ``by_group`` [coefficients, groups] float64; ``group_of`` [parameters] int32; ``steps`` [parameters] float64,
        this one counted; ``active`` [parameters] bool, whether it is updated.
        """

    def prepared(self) -> UpdateRule:
        """This rule, for updates of the same shards: their tensors keep dtypes and sizes, and what was checked and
        prepared for the first update holds for the others."""

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        """One fused pass over each: unscale, clip, update, cast into the parameter.

        Parameters have one dtype, and gradients one. ``hyper`` and what follows it are the same for all.
        """

    def update_in_float64(
        self, state: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any], step: float
    ) -> None:
        """The same, for ``verify``: written anew, and exact but for coefficients rounded once to fp32.

        ``state`` by name, the ``PARAMETER`` one always in it; all [n] float64, updated in place.
        """


def tensors_for(rule: UpdateRule, dtype: torch.dtype) -> list[StateTensor]:
    """The state of parameters of ``dtype``."""
    return [tensor for tensor in rule.tensors if tensor.begins is Begins.ZERO or tensor.dtype != dtype]


def has_master(rule: UpdateRule, dtype: torch.dtype) -> bool:
    """True if parameters of ``dtype`` have a more precise copy in the state."""
    return any(tensor.begins is Begins.PARAMETER for tensor in tensors_for(rule, dtype))


def master_of(rule: UpdateRule) -> str:
    """The name of the state that parameters are roundings of."""
    return next(tensor.name for tensor in rule.tensors if tensor.begins is Begins.PARAMETER)
