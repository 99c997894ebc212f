"""The hyper table: one row of coefficients a parameter, on the device, made of ``param_groups`` on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.streams import keep_for_current_stream, keep_tensors_of
from ..rules.update_rule import UpdateRule
from ..validate import check_described, check_groups
from .saved_state import SavedState


class HyperTable:
    """Step counts and coefficients of every parameter; nothing of it is read back by the host.

    Args:
        group_of: of every parameter, the number of its group.
        rules: the rule of each group.

    Attributes:
        steps: [parameters] float64, updates that each parameter has had. Skipped steps do not count.
        tables: by rule, [parameters, len(rule.columns)] fp32, what its update reads. The rows of parameters that
            another rule updates mean nothing.
        rates: [parameters, averages] fp32, how far averages go towards the new master; None: there are none.
        begins: the same shape, bool, whether the next update makes the average what the parameter is then.
    """

    def __init__(self, group_of: Sequence[int], rules: Sequence[UpdateRule], device: torch.device) -> None:
        self.steps = torch.zeros(0, dtype=torch.float64, device=device)
        self.tables: dict[UpdateRule, Tensor] = {}
        self.begins = torch.ones(0, len(rules[0].averages) if rules else 0, dtype=torch.bool, device=device)
        self.grow(group_of, rules)

    def grow(self, group_of: Sequence[int], rules: Sequence[UpdateRule]) -> None:
        """Make room for parameters and groups appended at the end of ``group_of`` and ``rules``."""
        keep_tensors_of(self)
        keep_for_current_stream(*self.tables.values())
        steps, begins, count, device = self.steps, self.begins, len(group_of), self.steps.device
        self._rules, self._own = list(rules), {rule: len(rule.coefficients) for rule in rules}
        self._places = {rule: [place for place, own in enumerate(rules) if own is rule] for rule in self._own}
        self._describing = [rule for rule in self._own if any(option.stays for option in rule.options)]
        self._averages = rules[0].averages if rules else ()
        self.steps = torch.zeros(count, dtype=torch.float64, device=device)
        self.tables = {
            rule: torch.zeros(count, len(rule.columns), dtype=torch.float32, device=device) for rule in self._own
        }
        averages = len(self._averages)
        self.begins = torch.ones(count, averages, dtype=torch.bool, device=device)
        self.rates = torch.zeros(count, averages, dtype=torch.float32, device=device) if averages else None
        self._group_of = torch.tensor(group_of, dtype=torch.int32, device=device)
        # [coefficients, groups], as last sent to the device: of each group those of its rule, the first of ``_width``;
        # the decays of averages follow.
        self._width = max(self._own.values(), default=0)
        self._by_group = torch.zeros(self._width + averages, len(rules), dtype=torch.float64, device=device)
        self._sent: list[list[float | None]] = []
        self._checked: list[list[float | None]] = []
        self._described: list[tuple[str, ...]] = []
        self.steps[: len(steps)], self.begins[: len(steps)] = steps, begins

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for a number that was set out of range since the last step, where it would make weights NaN,
        and for a description of parameters, such as ``view``, that a group's parameters do not fit."""
        # Tensors are not read: that would be a host sync.
        rows = self._read(groups)
        numbers = [*map(_numbers, rows)]
        described = [rule.describe(groups[place]) for rule in self._describing for place in self._places[rule]]
        if (numbers, described) != (self._checked, self._described):
            # A scheduler sets the rate, the first option, of all groups: to check all options takes 7 us each (Xeon).
            others_same = (numbers[1:], described) == (self._checked[1:], self._described)
            if not (others_same and all(first.allows(rows[0]) for rule in self._own for first in rule.options[:1])):
                check_groups(self._rules, groups)
        if described != self._described:
            check_described(self._rules, groups)
        self._checked, self._described = numbers, described

    def _read(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """Read the rows of ``_by_group``: a coefficient of all groups."""
        if len(self._own) == 1:
            return self._rules[0].read_groups(groups)
        rows: list[list[Any]] = [[0.0] * len(groups) for _ in range(self._width + len(self._averages))]
        for rule, places in self._places.items():
            read = rule.read_groups([groups[place] for place in places])
            for row, values in zip((*rows[: self._own[rule]], *rows[self._width :]), read, strict=True):
                for place, value in zip(places, values, strict=True):
                    row[place] = value
        return rows

    def take_over(self, saved: SavedState) -> None:
        """Take over loaded steps."""
        self.steps.copy_(saved.steps)
        # Averages that were not brought, or had no update yet, begin with the next one: the model may be loaded first.
        brought = [saved.tensors.get(index, ()) if step else () for index, step in enumerate(saved.steps.tolist())]
        begins = [[name not in names for name in self._averages] for names in brought]
        self.begins.copy_(torch.tensor(begins, dtype=torch.bool, device="cpu").view_as(self.begins))

    def advance(self, groups: Sequence[Mapping[str, Any]], active: Tensor, factor: Tensor | None = None) -> None:
        """Count a step for every ``active`` parameter ([parameters] bool) and make the tables for it. ``factor``,
        [parameters] fp32, multiplies the gradient of each: clipping some of them takes no pass over memory."""
        self.steps += active
        by_group = self._on_device(self._read(groups))
        for rule, table in self.tables.items():
            rule.fill_table(by_group[: self._own[rule]], self._group_of, self.steps, active, table)
        if self.rates is not None:
            rates = 1 - by_group[self._width :].index_select(1, self._group_of).t()
            self.rates.copy_(torch.where(self.begins, 1.0, rates) * active[:, None])
            self.begins &= ~active[:, None]
        if factor is not None:
            for rule, table in self.tables.items():
                table[:, rule.columns.index("grad_factor")].mul_(factor)

    def _on_device(self, rows: Sequence[list[Any]]) -> Tensor:
        """The groups' coefficients, [coefficients, groups]. Numbers are sent when they change, tensors every time."""
        capturing = is_capturing(self._by_group.device)
        # A captured step has coefficients of its own, its numbers fixed in kernels: a copy from the host would read, at
        # every replay, memory that is long gone.
        by_group = torch.empty_like(self._by_group) if capturing else self._by_group
        numbers = [*map(_numbers, rows)]
        if not capturing and numbers != self._sent:
            filled = [[value or 0.0 for value in row] for row in numbers]
            host = torch.tensor(filled, dtype=torch.float64, device="cpu", pin_memory=by_group.is_cuda)
            by_group.copy_(host, non_blocking=True)
            self._sent = numbers
        for place, row in enumerate(rows):
            for group, value in enumerate(row if capturing or row is not numbers[place] else ()):
                if not isinstance(value, Tensor):
                    if capturing:
                        by_group[place, group].fill_(float(value))
                    continue
                if capturing and not value.is_cuda:
                    own = place < self._width
                    name = self._rules[group].coefficients[place] if own else self._averages[place - self._width]
                    raise ValueError(
                        f"{name} of group {group} is a tensor on {value.device}, which a captured step cannot read: "
                        f"move it to {by_group.device}"
                    )
                by_group[place, group].copy_(value.reshape(()), non_blocking=True)
        return by_group


def _numbers(row: list[Any]) -> list[float | None]:
    """The values that are Python numbers; None for tensors. A row of floats is returned as it is."""
    # Of 465 groups the types take 9 us, and the numbers one by one 60 (Xeon).
    return row if {*map(type, row)} == {float} else [None if isinstance(n, Tensor) else float(n) for n in row]
