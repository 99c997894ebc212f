"""What a schedule keeps track of: the open cycle, the running forwards, the backwards that may follow, and the orders
of units: how the ranks' orders are merged into one, and which orders the ranks have agreed on.

Until the ranks have agreed, a cycle goes through the units as modules are listed. They agree at the end of a forward of
the root: on the order of forward in the first, and on both orders in the first that trains.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections.abc import Iterable, Sequence

import torch

from ..comm.sharding import Sharding
from .unit import Unit, UnitState

ORDER_CODES = 64
"""How many values a digest of cycles can have, as ranks compare theirs in ``step``."""


class Pass(enum.Enum):
    FORWARD = 1
    BACKWARD = 2


class Cycle:
    """The cycle that is open, or none: it goes once through all units, in an order that all ranks have agreed on.

    Attributes:
        direction: of the cycle that is open; None: none is.
        order: its units; one that is called several times is in it as often.
        position: of the unit that was visited last; -1: none was.
        open: the units that were visited in it and are not over, each with its position.
        stayed: the unit that is unsharded since the last forward, as backward begins with it; None: none is.
    """

    def __init__(self) -> None:
        self.direction: Pass | None = None
        self.order: Sequence[Unit] = ()
        self.position = -1
        self.open: dict[Unit, int] = {}
        self.stayed: Unit | None = None
        self._digest = 0

    def begin(self, direction: Pass, order: Sequence[Unit]) -> None:
        self.direction, self.order, self.position = direction, order, -1
        self._digest = zlib.crc32(bytes([direction.value]), self._digest)

    @property
    def ahead(self) -> Sequence[Unit]:
        return self.order[self.position + 1 :]

    def left_behind(self, unit: Unit) -> bool:
        """Whether ``unit`` is open only because nothing is closed as experts are entered, and has no turn ahead."""
        last = self.order[self.position]
        return last.of_experts and self.open[unit] < self.position and unit not in {*last.enclosing, *self.ahead}

    @property
    def code(self) -> int:
        """A digest of the cycles so far, which ranks compare."""
        return self._digest % ORDER_CODES


class Prefetch:
    """Starts gathers ahead of the visits. Each unit is gathered in its turn in any case, so ranks may start them at
    different times.

    Attributes:
        count: how many units are gathered ahead.
        reducing: reducers with a reduction in flight, under gloo. Gathers wait until it has arrived, or at the latest
            until the unit is visited: on the same threads they would slow it down, and take memory.
    """

    def __init__(self, cycle: Cycle, count: int) -> None:
        self._cycle, self.count = cycle, count
        self.reducing: set[object] = set()

    def reduction_begins(self, of: object) -> None:
        self.reducing.add(of)

    def reductions_arrived(self, of: object) -> None:
        """Gather ahead again, unless another reducer still has a reduction in flight."""
        if of in self.reducing:
            self.reducing.remove(of)
            if not self.reducing and self._cycle.direction is Pass.BACKWARD:
                self.start_next()

    def start_next(self, *, experts_alone: bool = False) -> None:
        """Gather the experts that come next; and ``count`` units more, unless ``experts_alone``.

        A rank whose experts get no tokens does not call them, and goes on to send tokens. So it must take part in the
        gathers that others wait for before::

            rank 0   block    experts: waits for rank 2    sends tokens back
            rank 2   block    (has no tokens)              sends tokens back: waits for rank 3, which waits like rank 0
        """
        if self._cycle.direction is not None:
            ahead = self._cycle.ahead
            experts = sum(1 for _ in itertools.takewhile(lambda unit: unit.of_experts, ahead))
            self.start(ahead[: experts if experts_alone else experts + self.count])

    def read_ahead(self) -> None:
        """Begin to read units from a disk: those that are gathered next, and as many after them."""
        for unit in self._cycle.order[self._cycle.position :][: 1 + 2 * self.count]:
            for flat in unit.flats if unit.state is UnitState.SHARDED else ():
                flat.memory.read_ahead()

    def start(self, units: Sequence[Unit]) -> None:
        """Start to gather these units, which are ahead, as far as their turn has come."""
        earlier: set[Unit] = set()
        for unit in units:
            # A unit that is here, or has an earlier turn, may be resharded after that turn, and gathered again. So this
            # turn's gather cannot start yet, nor can those behind it: gathers keep their order.
            here = unit.state is UnitState.UNSHARDED and unit is not self._cycle.stayed
            if here or unit in earlier:
                break
            unit.unshard()
            earlier.add(unit)


class Calls:
    """The forwards that run.

    Attributes:
        running: the units whose forward runs, the outermost first.
        trains: whether a backward may follow the forward cycle that is open, or was the last.
        by_part: whether that cycle was begun outside of a forward of the root.
    """

    def __init__(self) -> None:
        self.running: list[Unit] = []
        self.trains = False
        self.by_part = False
        self._roots = 0  # running forwards of the root: a model may call itself
        self._root_trains = False  # whether the outermost of them began with gradients enabled

    @property
    def in_root(self) -> bool:
        """True if a forward of the root runs."""
        return self._roots > 0

    def root_begins(self) -> bool:
        """Returns whether this is the root's outermost forward."""
        self._roots += 1
        if self._roots == 1:
            self._root_trains = torch.is_grad_enabled()
        return self._roots == 1

    def cycle_begins(self) -> None:
        self.by_part = not self.in_root
        # A re-entrant checkpoint within the root's forward disables gradients, and a backward follows all the same.
        self.trains = torch.is_grad_enabled() or (self.in_root and self._root_trains)

    def begin(self, unit: Unit) -> None:
        self.running.append(unit)
        unit.unwatch_parts()

    def end(self, unit: Unit, *, is_root: bool) -> None:
        """End a call of ``unit``, which may never have begun: its first hook may have raised."""
        if is_root:
            self._roots = max(0, self._roots - 1)
        if unit in self.running:
            self.running.pop()
            if unit not in self.running:
                unit.watch_parts()

    def caller_of(self, unit: Unit) -> Unit | None:
        """Find the unit whose forward calls this one, though this one is not within it; None: there is none."""
        caller = self.running[-1] if self.running else unit
        return None if caller is unit or caller in unit.enclosing else caller


class BackwardsDue:
    """The backward cycles that may still come.

    Attributes:
        count: forward cycles that a backward may still come back through.
        nested: whether a unit has called another, which is not within it, since none was due.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nested = False
        self._begun = 0  # forward cycles since none was due
        self._by_part = False  # whether one of them was begun outside of a forward of the root

    def forward_begins(self, *, by_part: bool) -> None:
        self._begun += 1
        self._by_part |= by_part

    def reset(self) -> None:
        """Let no backward be due: the gradients were applied."""
        self.count = self._begun = 0
        self.nested = self._by_part = False

    def is_last(self, known: Known) -> bool:
        """True if the backward cycle that is open is known to be the last before backward ends.

        With two forwards before one backward, the first cycle back is not the last. The second brings more gradients to
        the same parameters: a bucket that was launched by then would miss them. How many come is unknown

        - of a graph that is gone through again;
        - where parts were called in several cycles: a re-entrant checkpoint makes none due;
        - where a unit has called another: backward comes back to the first;
        - where the order of the forward alone is known: a unit that is in it twice takes two cycles back.
        """
        countable = not self.nested and not (self._by_part and self._begun > 1) and known is not Known.FORWARD
        return self.count == 1 and countable


# -- orders ------------------------------------------------------------------------------------------------------------


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

    @property
    def last(self) -> Unit | None:
        """The unit with which backward begins, behind the root. None: it is not known, or has experts."""
        first = self.backward[1:2] if self.known is Known.BOTH else []
        return next((unit for unit in first if not unit.of_experts), None)

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
            kept = visited if unit.of_experts else {unit, *unit.enclosing}
            left = [other for other in visited if other not in kept]
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
