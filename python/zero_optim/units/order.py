"""Orders of units: how the ranks' orders are merged into one, and which orders the ranks have agreed on.

Until the ranks have agreed, a cycle goes through the units as modules are listed. They agree at the end of a forward of
the root: on the order of forward in the first, and on both orders in the first that trains.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence

from ..comm.sharding import Sharding
from .unit import Unit


class Known(enum.Enum):
    """The orders that the ranks have agreed on."""

    NOTHING = enum.auto()
    FORWARD = enum.auto()
    BOTH = enum.auto()


class Orders:
    """The orders of the two cycles, and what this rank has seen since the last forward of the root began.

    Attributes:
        forward, backward: the units as cycles go through them.
        known: which of the two the ranks have agreed on.
        called: the units in the order of their calls; one that is called twice in a row is in it once.
        ended: the units in the order in which calls end, each with whether backward comes to it.
    """

    def __init__(self, units: Sequence[Unit], sharding: Sharding) -> None:
        self._units, self._sharding = list(units), sharding
        self.forward: list[Unit] = list(units)
        self.backward: list[Unit] = calls_ended(units)[::-1]
        self.known = Known.NOTHING
        self.called: list[Unit] = []
        self.ended: list[tuple[Unit, bool]] = []

    def record(self) -> None:
        """Learn the orders again, from the next forwards of the root."""
        self.known = Known.NOTHING

    def agree(self, *, trains: bool) -> None:
        """Collective. Take rank 0's order, and add the units to it that only other ranks, or none, have used."""
        number = {unit: index for index, unit in enumerate(self._units)}
        report = ([number[unit] for unit in self.called], [(number[u], needed) for u, needed in self.ended])
        reports = self._sharding.world.gather_objects(report, "the first forward")
        known = nested(self.forward)  # where an earlier forward was seen, in its order
        orders = [[self._units[index] for index in called] for called, _ in reports]
        self.forward = merged(orders, known)
        self.known = Known.FORWARD
        if trains:
            useless = {index for _, ended in reports for index, needed in ended if not needed}
            useless -= {index for _, ended in reports for index, needed in ended if needed}
            needed_units = [unit for unit in reversed(calls_ended(known)) if number[unit] not in useless]
            orders = [[self._units[index] for index, _ in reversed(of) if index not in useless] for _, of in reports]
            self.backward = merged(orders, needed_units)
            self.known = Known.BOTH

    @property
    def over(self) -> list[Unit]:
        """All units in the order in which a backward is through with them; last those that it does not come to."""
        visited: list[Unit] = []
        closed: list[Unit] = []  # as ``UnitSchedule`` closes units when it visits those of the cycle, inner ones first
        for unit in self.backward:
            left = [other for other in visited if other is not unit and other not in unit.enclosing]
            visited = [other for other in visited if other not in left and other is not unit] + [unit]
            closed += sorted(left, key=lambda other: -len(other.enclosing))
        closed += sorted(visited, key=lambda other: -len(other.enclosing))
        last = list(dict.fromkeys(reversed(closed)))[::-1]  # of a unit that is visited again, the last time counts
        return [*last, *(unit for unit in self._units if unit not in last)]


def calls_ended(units: Sequence[Unit]) -> list[Unit]:
    """Order units by the end of their calls, which begin in the order of ``units``: inner units end first."""
    ended: list[Unit] = []
    running: list[Unit] = []
    for unit in units:
        while running and running[-1] not in unit.enclosing:
            ended.append(running.pop())
        running.append(unit)
    return ended + running[::-1]


def nested(units: Iterable[Unit]) -> list[Unit]:
    """List each of ``units`` once, directly before its inner units; else in the order in which they first come."""
    place = {unit: number for number, unit in enumerate(dict.fromkeys(units))}

    def path(unit: Unit) -> list[int]:
        around = sorted(unit.enclosing & place.keys(), key=lambda outer: len(outer.enclosing))
        return [place[of] for of in (*around, unit)]

    return sorted(place, key=path)


def merged(orders: Sequence[Sequence[Unit]], known: Sequence[Unit]) -> list[Unit]:
    """Merge the ranks' orders into one of all ``known`` units: rank 0's, if it has all units that any rank has.

    In ``orders``, and in ``known``, which is ``nested``, a unit comes before its inner units. So it does in the result,
    with no outside unit in between: the units around a unit stay unsharded on the way to it.
    """
    before: dict[Unit, set[Unit]] = {unit: set() for order in orders for unit in order}
    if before.keys() <= set(orders[0]):
        return _complete(orders[0], known)
    # Every unit that any rank has comes once: after the units that it first follows on any rank, else as ``known``.
    for order in orders:
        for earlier, later in itertools.pairwise(dict.fromkeys(order)):
            before[later].add(earlier)
    agreed: list[Unit] = []
    left = [unit for unit in known if unit in before]
    while left:
        ready = [unit for unit in left if before[unit].issubset(agreed)]
        agreed.append((ready or left)[0])  # none is ready where ranks contradict each other
        left.remove(agreed[-1])
    return _complete(nested(agreed), known)


def _complete(order: Sequence[Unit], known: Sequence[Unit]) -> list[Unit]:
    """Put the ``known`` units that ``order`` lacks into it, and leave out immediate repeats.

    A missing unit comes after the unit before it in ``known`` that has the same units around it: after the last call of
    that one, and of all within it. Where it is the first, it comes directly after the unit that it is in::

        known    root  A  A1  A2  B        A1 and A2 are within A
        order    root  A  A1  B            A2 is missing: after the last call of A1
        result   root  A  A1  A2  B
    """
    complete = [unit for place, unit in enumerate(order) if place == 0 or order[place - 1] is not unit]
    used = set(complete)
    around_of = {unit: frozenset(unit.enclosing.intersection(known)) for unit in known}
    for place, unit in enumerate(known):
        if unit in used:
            continue
        around = around_of[unit]
        beside = [other for other in known[:place] if around_of[other] == around]
        at = 0
        if beside:
            at = len(complete) - complete[::-1].index(beside[-1])  # behind its last call
            while at < len(complete) and beside[-1] in complete[at].enclosing:
                at += 1
        elif around:
            innermost = max(around, key=lambda other: len(other.enclosing))
            at = len(complete) - complete[::-1].index(innermost)
        complete.insert(at, unit)
    return complete
