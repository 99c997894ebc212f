"""Makes of ``param_groups`` on the host one row of coefficients a parameter on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.streams import keep_tensors_of
from ..rules.update_rule import UpdateRule
from ..validate import check_groups
from .saved_state import SavedState


class HyperTable:
    """Step counts and coefficients of every parameter; nothing of it is read back by the host.

    Attributes:
        steps: [parameters] float64, updates that each parameter has had. Skipped steps do not count.
        table: [parameters, len(rule.columns)] fp32, what the rule's update reads.
        rates: [parameters, len(rule.averages)] fp32, how far averages go towards the new master; None: there are none.
        begins: the same shape, bool, whether the next update makes the average what the parameter is then.
    """

    def __init__(self, group_of: Sequence[int], groups: int, device: torch.device, rule: UpdateRule) -> None:
        self.rule = rule
        self._grad_factor = rule.columns.index("grad_factor")
        self._names = (*rule.coefficients, *rule.averages)
        self._allocate(group_of, groups, device)

    def _allocate(self, group_of: Sequence[int], groups: int, device: torch.device) -> None:
        self.steps = torch.zeros(len(group_of), dtype=torch.float64, device=device)
        self.table = torch.zeros(len(group_of), len(self.rule.columns), dtype=torch.float32, device=device)
        averages = len(self.rule.averages)
        self.begins = torch.ones(len(group_of), averages, dtype=torch.bool, device=device)
        self.rates = torch.zeros(len(group_of), averages, dtype=torch.float32, device=device) if averages else None
        self._group_of = torch.tensor(group_of, dtype=torch.int32, device=device)
        # [coefficients, groups], as last sent to the device
        self._by_group = torch.zeros(len(self._names), groups, dtype=torch.float64, device=device)
        self._sent: list[tuple[float | None, ...]] = []
        self._checked: list[tuple[float | None, ...]] = []

    def grow(self, group_of: Sequence[int], groups: int) -> None:
        """Make room for parameters and groups appended at the end; those that were there keep their steps.

        Args:
            group_of: of every parameter, old and new, the index of its group.
            groups: how many there are now.
        """
        keep_tensors_of(self)
        steps, begins = self.steps, self.begins
        self._allocate(group_of, groups, steps.device)
        self.steps[: len(steps)], self.begins[: len(steps)] = steps, begins

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for a number that was set out of range since the last step, where it would make weights NaN.

        Tensors are not read: that would be a host sync.
        """
        numbers = _numbers([self.rule.read_group(group) for group in groups])
        if numbers != self._checked:
            check_groups(self.rule, groups)
            self._checked = numbers

    def take_over(self, saved: SavedState) -> None:
        """Take over loaded steps. Averages that were not brought begin with the next update: the model may be loaded
        until then."""
        self.steps.copy_(saved.steps)
        brought = [saved.tensors.get(index, ()) for index in range(len(self.steps))]
        begins = [[name not in names for name in self.rule.averages] for names in brought]
        self.begins.copy_(torch.tensor(begins, dtype=torch.bool, device="cpu").view_as(self.begins))

    def advance(self, groups: Sequence[Mapping[str, Any]], active: Tensor, factor: Tensor | None = None) -> None:
        """Count a step for every ``active`` parameter ([parameters] bool) and make the table for it.

        ``factor``, [parameters] fp32 on the table's device, multiplies the gradient of each parameter: clipping that
        leaves some of them out takes no pass over memory.
        """
        self.steps += active
        coefficients = self._on_device([self.rule.read_group(group) for group in groups])
        own = len(self.rule.coefficients)
        self.rule.fill_table(coefficients[:own], self._group_of, self.steps, active, self.table)
        if self.rates is not None:
            rates = 1 - coefficients[own:].index_select(1, self._group_of).t()
            self.rates.copy_(torch.where(self.begins, 1.0, rates))
            self.begins &= ~active[:, None]
        if factor is not None:
            self.grad_factors.mul_(factor)

    @property
    def grad_factors(self) -> Tensor:
        """[parameters] fp32, a view of ``table``: what multiplies the gradients of each parameter."""
        return self.table[:, self._grad_factor]

    def _on_device(self, rows: Sequence[tuple[Any, ...]]) -> Tensor:
        """The groups' coefficients, [coefficients, groups]. Numbers are sent when they change, tensors every time."""
        capturing = is_capturing(self._by_group.device)
        # A captured step has coefficients of its own, its numbers fixed in kernels: a copy from the host would read, at
        # every replay, memory that is long gone.
        by_group = torch.empty_like(self._by_group) if capturing else self._by_group
        numbers = _numbers(rows)
        if capturing:
            for group, column, value in _entries(numbers):
                by_group[column, group].fill_(value or 0.0)
        elif numbers != self._sent:
            columns = [[value or 0.0 for value in column] for column in zip(*numbers, strict=True)]
            host = torch.tensor(columns, dtype=torch.float64, device="cpu", pin_memory=by_group.is_cuda)
            by_group.copy_(host, non_blocking=True)
            self._sent = numbers
        for group, column, value in _entries(rows):
            if isinstance(value, Tensor):
                name = self._names[column]
                if capturing and not value.is_cuda:
                    raise ValueError(
                        f"{name} of group {group} is a tensor on {value.device}, which a captured step cannot read: "
                        f"move it to {by_group.device}"
                    )
                by_group[column, group].copy_(value.reshape(()), non_blocking=True)
        return by_group


def _numbers(rows: Sequence[tuple[Any, ...]]) -> list[tuple[float | None, ...]]:
    """The coefficients that are Python numbers; None for tensors."""
    return [tuple(None if isinstance(value, Tensor) else float(value) for value in row) for row in rows]


def _entries(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, int, Any]]:
    return ((group, column, value) for group, row in enumerate(rows) for column, value in enumerate(row))
