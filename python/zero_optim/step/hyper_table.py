"""The hyper table: one row of coefficients a parameter, on the device, made of ``param_groups`` on the host."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.streams import keep_for_current_stream, keep_tensors_of
from ..rules.update_rule import UpdateRule
from ..validate import check_described, check_groups
from .alarms import HASH_BITS
from .saved_state import SavedState


class HyperTable:
    """Step counts and coefficients of every parameter; nothing of it is read back by the host.

    Args:
        group_of: of every parameter, the number of its group.
        rules: the rule of each group.
        hashes: whether ranks compare what they use.

    Attributes:
        steps: [parameters] float64, updates that each parameter has had, without skipped steps. -0.0, which is saved,
            too: none since a reset, and some before.
        tables: by rule, [parameters, len(rule.columns)] fp32, what its update reads. The rows of parameters that
            another rule updates mean nothing.
        hash_bits: [2 * HASH_BITS] fp32, the bits of a hash of what the last step has used, and their complements.
        rates: [parameters, averages] fp32, how far averages go towards the new master; None: there are none.
        beside: further options of a step that ranks compare, in words.
        begins: the same shape, bool, whether the next update makes the average what the parameter is then.
    """

    def __init__(
        self, group_of: Sequence[int], rules: Sequence[UpdateRule], device: torch.device, *, hashes: bool = False
    ) -> None:
        self.steps = torch.zeros(0, dtype=torch.float64, device=device)
        self.tables: dict[UpdateRule, Tensor] = {}
        self.begins = torch.ones(0, len(rules[0].averages) if rules else 0, dtype=torch.bool, device=device)
        self.hash_bits, self._hashes = torch.zeros(2 * HASH_BITS, dtype=torch.float32, device=device), hashes
        masks = torch.tensor([1 << bit for bit in range(HASH_BITS - 1)] + [-(1 << HASH_BITS - 1)], device="cpu")
        self._masks = masks.to(device)
        self.reset_hash()
        self._width = 0
        self.beside: Sequence[str] = ()
        self._used: list[tuple[list[list[Any]], Sequence[str]]] = []  # of the last two steps, rows and ``beside``
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
        before, self._width = self._width, max(self._own.values(), default=0)
        if before != self._width:  # their rows would have other names
            self._used = []
        self._by_group = torch.zeros(self._width + averages, len(rules), dtype=torch.float64, device=device)
        generator, of_all = torch.Generator("cpu").manual_seed(len(rules)), self._by_group.shape
        odd = torch.randint(-(2**62), 2**62, of_all, generator=generator, dtype=torch.int64, device="cpu") | 1
        self._weights = odd.to(device)
        self._sent: list[list[float | None]] = []
        self._checked: list[list[float | None]] = []
        self._described: list[tuple[str, ...]] = []
        self.steps[: len(steps)], self.begins[: len(steps)] = steps, begins

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for a number that was set out of range since the last step, where it would make weights NaN,
        and for a description of parameters, such as ``view``, that a group's parameters do not fit."""
        # Tensors are not read: that would be a host sync.
        try:
            rows = self._read(groups)
        except (IndexError, TypeError):  # too few numbers, of which this has more to say
            check_groups(self._rules, groups)
            raise
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
        brought = [saved.tensors.get(i, ()) if of else () for i, of in enumerate(was_updated(saved.steps).tolist())]
        begins = [[name not in names for name in self._averages] for names in brought]
        self.begins.copy_(torch.tensor(begins, dtype=torch.bool, device="cpu").view_as(self.begins))

    def advance(self, groups: Sequence[Mapping[str, Any]], active: Tensor, factor: Tensor | None = None) -> None:
        """Count a step for every ``active`` parameter ([parameters] bool) and make the tables for it. ``factor``,
        [parameters] fp32, multiplies the gradient of each: clipping some of them takes no pass over memory."""
        torch.where(active, self.steps + 1, self.steps, out=self.steps)  # -0.0 + 0 would lose the sign
        rows = self._read(groups)
        by_group, changed = self._on_device(rows)
        changed |= [beside for _, beside in self._used[-1:]] != [self.beside]
        self._used = [*self._used[-1:], (rows, self.beside)]
        if self._hashes and (changed or not self._hashed):
            self._hash(by_group)
        for rule, table in self.tables.items():
            rule.fill_table(by_group[: self._own[rule]], self._group_of, self.steps, active, table)
        if self.rates is not None:
            rates = 1 - by_group[self._width :].index_select(1, self._group_of).t()
            self.rates.copy_(torch.where(self.begins, 1.0, rates) * active[:, None])
            self.begins &= ~active[:, None]
        if factor is not None:
            for rule, table in self.tables.items():
                table[:, rule.columns.index("grad_factor")].mul_(factor)

    def reset_hash(self) -> None:
        """Forget what the last step has used."""
        self.hash_bits[:HASH_BITS], self.hash_bits[HASH_BITS:] = 0.0, 1.0
        self._hashed = False

    def describe_used(self) -> list[str]:
        """List what the last two steps have used, the earlier one first. The host waits for tensors on the device."""
        of_groups = [
            f"{name}={float(value)} in group {group}"
            for rows, _ in self._used
            for place, row in enumerate(rows)
            for group, value in enumerate(row)
            if (name := self._name(place, group))
        ]
        return [*of_groups, *(option for _, beside in self._used for option in beside)]

    def _name(self, place: int, group: int) -> str:
        """Name a coefficient of a group by its row; empty: the group's rule has no such one."""
        if place >= self._width:
            return self._averages[place - self._width]
        names = self._rules[group].coefficients
        return names[place] if place < len(names) else ""

    def _hash(self, by_group: Tensor) -> None:
        # Odd factors: a change of one number always changes the sum. The exponents are added in below, as a number such
        # as 0.5 has no other bits, and those of two groups would often cancel. On the device: options may be tensors.
        numbers = by_group.view(torch.int64)
        total = ((numbers ^ torch.bitwise_right_shift(numbers, 32)) * self._weights).sum()
        bits = (total + zlib.crc32(repr(self.beside).encode())) & self._masks
        torch.cat([bits != 0, bits == 0], out=self.hash_bits)
        self._hashed = True

    def _on_device(self, rows: Sequence[list[Any]]) -> tuple[Tensor, bool]:
        """The groups' coefficients, [coefficients, groups], and whether they may have changed since the last step.
        Numbers are sent when they change, tensors every time."""
        capturing = is_capturing(self._by_group.device)
        # A captured step has coefficients of its own, its numbers fixed in kernels: a copy from the host would read, at
        # every replay, memory that is long gone.
        by_group = torch.empty_like(self._by_group) if capturing else self._by_group
        numbers = [*map(_numbers, rows)]
        changed = capturing or numbers != self._sent or any(None in row for row in numbers)
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
                    raise ValueError(
                        f"{self._name(place, group)} of group {group} is a tensor on {value.device}, which a captured "
                        f"step cannot read: move it to {by_group.device}"
                    )
                by_group[place, group].copy_(value.reshape(()), non_blocking=True)
        return by_group, changed


def was_updated(steps: Tensor) -> Tensor:
    """[parameters] bool: whether there was an update, before a reset or after: masters and averages are to be kept."""
    return (steps > 0) | steps.signbit()


def _numbers(row: list[Any]) -> list[float | None]:
    """The values that are Python numbers; None for tensors. A row of floats is returned as it is."""
    # Of 465 groups the types take 9 us, and the numbers one by one 60 (Xeon).
    return row if {*map(type, row)} == {float} else [None if isinstance(n, Tensor) else float(n) for n in row]
