"""A rule with a kernel of its own on every backend: the op ``foreach_step`` runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import zero_kernels

from .state_tensor import Begins, StateTensor
from .update_rule import MASTER, ShardUpdate, UpdateRule, lists_of


class KernelRule(UpdateRule):
    """A rule whose table and update are those of a kernel.

    Args:
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

    def _as_kernel(self) -> zero_kernels.Rule:
        return self._of_kernel

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        if self.codecs:  # the kernels know none: torch's ops do it
            return super().update(shards)
        self._step(self.kernel, *lists_of(shards, MASTER, self._of_kernel.states, self.averages))
