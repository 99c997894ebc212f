"""A rule with a kernel of its own on every backend: the op ``foreach_step`` runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import zero_kernels

from .codec import Bf16, Int8, Root8, Split, Split8, StochasticBf16
from .state_tensor import Begins, StateTensor
from .update_rule import MASTER, ShardUpdate, UpdateRule, lists_of, parts_of

_OF_KERNELS = (Bf16, StochasticBf16, Int8, Root8, Split, Split8)
"""Codecs that kernels know. State that is stored by another is updated by torch's ops."""

_Names = tuple[str, list[str], list[str], list[str]]
"""Of the master, of each state, of the scales of those that have one, and of the averages."""


class KernelRule(UpdateRule):
    """A rule whose table and update are those of a kernel.

    Args:
        kernel: its name in ``zero_kernels.RULES``, which says what state there is beside the master.
    """

    def __init__(self, kernel: str, **values: Any) -> None:
        super().__init__(**values)
        self._use(kernel)
        self._step: Callable[..., None] = zero_kernels.foreach_step
        self._names: _Names | None = None  # of what is stored; made in ``prepared``

    def _use(self, kernel: str) -> None:
        self.kernel, self._of_kernel = kernel, zero_kernels.RULES[kernel]
        self.tensors = (StateTensor(MASTER, Begins.PARAMETER), *map(StateTensor, self._of_kernel.states))

    @property
    def columns(self) -> tuple[str, ...]:
        return self._of_kernel.columns

    @property
    def coefficients(self) -> tuple[str, ...]:
        return self._of_kernel.coefficients

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        self._of_kernel.fill_table(by_group, group_of, steps, active, table)

    def prepared(self) -> KernelRule:
        made = copy.copy(self)
        made._step = zero_kernels.Prepared("foreach_step")
        made._names = self._names_as_stored()
        return made

    def _as_kernel(self) -> zero_kernels.Rule:
        return self._of_kernel

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        given = {type(codec) for codec in self.codecs.values()}
        if not given <= set(_OF_KERNELS) or given >= {Bf16, StochasticBf16}:  # a kernel rounds all bf16 in one way
            return super().update(shards)
        master, states, scales, averages = self._names or self._names_as_stored()
        of_shards = [shard.state[name] for shard in shards for name in scales]
        *lists, row_keys = lists_of(shards, master, states, averages)
        # Shards have keys where any of their state needs them. Given keys, a kernel rounds all bf16 by noise.
        by_noise = any(codec.stochastic for codec in self.codecs.values())
        self._step(self.kernel, *lists, of_shards or None, row_keys if by_noise else None)

    def _names_as_stored(self) -> _Names:
        master, *states = (
            parts_of(self.codecs, tensor) for tensor in map(StateTensor, (MASTER, *self._of_kernel.states))
        )
        scales = [part.name for of in states for part in of[1:]]
        return master[0].name, [parts[0].name for parts in states], scales, self.stored_averages
