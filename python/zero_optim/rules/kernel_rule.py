"""A rule with a kernel of its own on every backend: the op ``foreach_step`` runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

import zero_kernels

from .state_tensor import Begins, StateTensor
from .update_rule import MASTER, ShardUpdate, UpdateRule, lists_of, parts_of


class _Stored(NamedTuple):
    """The names of the stored tensors that a kernel is given.

    Attributes:
        master: of the stored master, as ``states`` and ``averages`` are.
        scales: of the states that have one.
        by_noise: whether some state is rounded by noise. Given keys of rows, a kernel rounds all bf16 so.
    """

    master: str
    states: list[str]
    scales: list[str]
    averages: list[str]
    by_noise: bool


class KernelRule(UpdateRule):
    """A rule whose table and update are those of a kernel.

    Args:
        kernel: its name in ``zero_kernels.RULES``, which says what state there is beside the master.
    """

    def __init__(self, kernel: str, **values: Any) -> None:
        super().__init__(**values)
        self._use(kernel)
        self._step: Callable[..., None] = zero_kernels.foreach_step
        self._stored: _Stored | None = None  # made in ``prepared``

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
        made._stored = self._as_stored()
        return made

    def _as_kernel(self) -> zero_kernels.Rule:
        return self._of_kernel

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        stored = self._stored or self._as_stored()
        *lists, row_keys = lists_of(shards, stored.master, stored.states, stored.averages)
        scales = [shard.state[name] for shard in shards for name in stored.scales]
        self._step(self.kernel, *lists, scales or None, row_keys if stored.by_noise else None)

    def _as_stored(self) -> _Stored:
        master, *states = (
            parts_of(self.codecs, tensor) for tensor in map(StateTensor, (MASTER, *self._of_kernel.states))
        )
        return _Stored(
            master[0].name,
            [parts[0].name for parts in states],
            [part.name for of in states for part in of[1:]],
            [*self.averages],
            any(codec.stochastic for codec in self.codecs.values()),
        )
