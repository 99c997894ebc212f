"""Orders of units: those of the ranks made one, and what follows from one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .unit import Unit


def calls_ended(units: Sequence[Unit]) -> list[Unit]:
    """The order in which calls end that begin in the order of ``units``: of a unit after those within it."""
    ended: list[Unit] = []
    running: list[Unit] = []
    for unit in units:
        while running and running[-1] not in unit.enclosing:
            ended.append(running.pop())
        running.append(unit)
    return ended + running[::-1]


def merged(orders: Sequence[Sequence[Unit]], known: Sequence[Unit]) -> list[Unit]:
    """One order of all ``known`` units from those of the ranks: rank 0's, where it has all that any rank has.

    In each a unit comes before those within it. So it does in the result, with nothing in between that is outside of
    it: on the way to a unit, those that it is within stay unsharded.
    """
    used = {unit for order in orders for unit in order}
    return _complete(orders[0] if used <= set(orders[0]) else _agreeing(orders, known), known)


def _agreeing(orders: Sequence[Sequence[Unit]], known: Sequence[Unit]) -> list[Unit]:
    """Every unit that any rank has, once: after what it first follows on any rank.

    Of those that may come next, one within the last unit does; or within what that is within. Else the first that is
    ``known``.
    """
    before: dict[Unit, set[Unit]] = {unit: set() for order in orders for unit in order}
    for order in orders:
        for earlier, later in itertools.pairwise(dict.fromkeys(order)):
            before[later].add(earlier)
    agreed: list[Unit] = []
    around: set[Unit] = set()
    left = [unit for unit in known if unit in before]
    while left:
        ready = [unit for unit in left if before[unit].issubset(agreed)] or left  # left: ranks contradict each other
        agreed.append(max(ready, key=lambda unit: len(unit.enclosing & around)))
        around = {agreed[-1], *agreed[-1].enclosing}
        left.remove(agreed[-1])
    return agreed


def _complete(order: Sequence[Unit], known: Sequence[Unit]) -> list[Unit]:
    """``order`` without immediate repeats, and with those ``known`` that it lacks, each after its predecessor there."""
    complete = [unit for place, unit in enumerate(order) if place == 0 or order[place - 1] is not unit]
    for place, unit in enumerate(known):
        if unit not in complete:
            before = known[place - 1] if place else None
            at = len(complete) - complete[::-1].index(before) if before in complete else 0
            complete.insert(at, unit)
    return complete


def over(cycle: Sequence[Unit]) -> Iterator[Unit]:
    """Units in the order in which they are over, as ``UnitSchedule`` closes them when it visits those of ``cycle``."""
    visited: list[Unit] = []
    for unit in cycle:
        left = [other for other in visited if other is not unit and other not in unit.enclosing]
        visited = [other for other in visited if other not in left and other is not unit] + [unit]
        yield from sorted(left, key=lambda other: -len(other.enclosing))
    yield from sorted(visited, key=lambda other: -len(other.enclosing))
