"""A rule with a kernel of its own on every backend: the op ``foreach_step`` runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import zero_kernels

from .update_rule import MASTER, Begins, ShardUpdate, StateTensor, UpdateRule


class KernelRule(UpdateRule):
    """Args:
    kernel: its name in ``zero_kernels.RULES``, which says what state there is beside the master.
    """

    def __init__(self, kernel: str, **values: Any) -> None:
        super().__init__(**values)
        self._use(kernel)
        self._step: Callable[..., None] = zero_kernels.foreach_step

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
        return made

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        names = self._of_kernel.states
        apart = MASTER in shards[0].state  # else the parameters are fp32, and their own masters
        self._step(
            self.kernel,
            [shard.grad for shard in shards],
            [shard.state[MASTER] if apart else shard.parameter for shard in shards],
            [shard.state[name] for shard in shards for name in names],
            [shard.parameter for shard in shards] if apart else [],
            [shard.row_slot for shard in shards],
            *shards[0].shared,
            [shard.state[name] for shard in shards for name in self.averages] or None,
            shards[0].rates,
        )
