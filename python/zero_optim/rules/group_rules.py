"""The rule that updates each parameter: most often one for all, or one that the parameter group has brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..params.parameter_set import ParameterSet
from .update_rule import UpdateRule

RULE = "rule"
"""The key in a parameter group of the rule that it brings."""

Apply = Callable[[UpdateRule, Sequence[Mapping[str, Any]]], UpdateRule]
"""Turns a rule, as it was given, into the one for its first groups: with state in the form that was asked for, and with
averages. May raise ValueError."""


class GroupRules:
    """The rules of an optimizer, by parameter group.

    A bucket has the parameters of one rule, a shard the state of one, and each rule has a hyper table of its own. The
    averages and the form of state are the same for all rules.

    Args:
        parameters: the parameters, whose groups have the rules.

    Attributes:
        all: each rule once, in the order in which the groups came with them.
        by_group: of each group, the one of ``all`` that updates it.
    """

    def __init__(self, parameters: ParameterSet, apply: Apply) -> None:
        self._parameters, self._apply = parameters, apply
        self._given: list[UpdateRule] = []  # what ``all`` was made of
        self.all: list[UpdateRule] = []
        self.by_group: list[UpdateRule] = []

    def of(self, index: int) -> UpdateRule:
        """Find the rule of a parameter."""
        return self.by_group[self._parameters.group_of[index]]

    @property
    def averages(self) -> tuple[str, ...]:
        """Names of the averages that are kept of every parameter."""
        return self.all[0].averages

    def take(self, given: Sequence[UpdateRule]) -> None:
        """Take in the rules of new groups, one for each. Rules that differ in defaults alone count as one.

        Raises ValueError; ``forget`` what was taken in then.
        """
        first = len(self.by_group)
        numbers: list[int] = []  # of each in ``_given``
        for rule in given:
            known = (number for number, other in enumerate(self._given) if _alike(rule, other))
            number = next(known, len(self._given))
            if number == len(self._given):
                self._given.append(rule)
            numbers.append(number)
        for number in range(len(self.all), len(self._given)):
            groups = [self._parameters.groups[first + place] for place, own in enumerate(numbers) if own == number]
            self.all.append(self._apply(self._given[number], groups))
        self.by_group += [self.all[number] for number in numbers]

    def forget(self, first: int) -> None:
        """Forget the groups from number ``first`` on, and the rules that no other has."""
        del self.by_group[first:]
        self.all[:] = [rule for rule in self.all if rule in self.by_group]
        del self._given[len(self.all) :]


def _alike(one: UpdateRule, other: UpdateRule) -> bool:
    """Whether one rule can take the place of both: they differ in defaults alone, which a group may override."""
    if one is other:
        return True
    own, its = ({**vars(rule), "defaults": rule.fixed} for rule in (one, other))
    return type(one) is type(other) and own == its
