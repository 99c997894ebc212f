"""Orders of units: those of the ranks made one, and what follows from one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

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


def nested(units: Iterable[Unit]) -> list[Unit]:
    """Each of ``units`` once, directly before those within it; else in the order in which they first come."""
    place = {unit: number for number, unit in enumerate(dict.fromkeys(units))}

    def path(unit: Unit) -> list[int]:
        around = sorted(unit.enclosing & place.keys(), key=lambda outer: len(outer.enclosing))
        return [place[of] for of in (*around, unit)]

    return sorted(place, key=path)


def merged(orders: Sequence[Sequence[Unit]], known: Sequence[Unit]) -> list[Unit]:
    """One order of all ``known`` units from those of the ranks: rank 0's, where it has all that any rank has.

    A unit comes before those within it, in ``orders`` and in ``known``, which is ``nested``. So it does in the result,
    with nothing in between that is outside of it: what a unit is within stays unsharded on the way to it.
    """
    used = {unit for order in orders for unit in order}
    return _complete(orders[0] if used <= set(orders[0]) else _agreeing(orders, known), known)


def _agreeing(orders: Sequence[Sequence[Unit]], known: Sequence[Unit]) -> list[Unit]:
    """Every unit that any rank has, once: after what it first follows on any rank, else as ``known`` has it."""
    before: dict[Unit, set[Unit]] = {unit: set() for order in orders for unit in order}
    for order in orders:
        for earlier, later in itertools.pairwise(dict.fromkeys(order)):
            before[later].add(earlier)
    agreed: list[Unit] = []
    left = [unit for unit in known if unit in before]
    while left:
        ready = [unit for unit in left if before[unit].issubset(agreed)]
        agreed.append((ready or left)[0])  # none is ready where ranks contradict each other
        left.remove(agreed[-1])
    return nested(agreed)


def _complete(order: Sequence[Unit], known: Sequence[Unit]) -> list[Unit]:
    """``order`` without immediate repeats, and with those ``known`` that it lacks: after the last call of what comes
    before them within the same unit, and of all within that; or else directly after the unit that they are in."""
    complete = [unit for place, unit in enumerate(order) if place == 0 or order[place - 1] is not unit]
    used = set(complete)
    around_of = {unit: frozenset(unit.enclosing.intersection(known)) for unit in known}
    for place, unit in enumerate(known):
        if unit in used:
            continue
        around = around_of[unit]
        beside = [other for other in known[:place] if around_of[other] == around]
        at = _after_last(complete, beside[-1]) if beside else 0
        if not beside and around:
            at = 1 + _last(complete, max(around, key=lambda outer: len(outer.enclosing)))
        complete.insert(at, unit)
    return complete


def _last(order: Sequence[Unit], unit: Unit) -> int:
    return len(order) - 1 - order[::-1].index(unit)


def _after_last(order: Sequence[Unit], unit: Unit) -> int:
    """Where the last call of ``unit`` is over, with those within it."""
    at = 1 + _last(order, unit)
    while at < len(order) and unit in order[at].enclosing:
        at += 1
    return at


def over(cycle: Sequence[Unit]) -> Iterator[Unit]:
    """Units in the order in which they are over, as ``UnitSchedule`` closes them when it visits those of ``cycle``."""
    visited: list[Unit] = []
    for unit in cycle:
        left = [other for other in visited if other is not unit and other not in unit.enclosing]
        visited = [other for other in visited if other not in left and other is not unit] + [unit]
        yield from sorted(left, key=lambda other: -len(other.enclosing))
    yield from sorted(visited, key=lambda other: -len(other.enclosing))
