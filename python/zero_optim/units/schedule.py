"""Which unit is unsharded when: one fixed order of gathers, the same on every rank, whatever a rank's forward uses.

A *cycle* goes once through all units: a forward cycle in the order in which a forward calls them, a backward cycle in
the order in which a backward comes back to them. Ranks gather by position in the cycle alone, so they agree without
talking. To *visit* a unit is to go to its position in the cycle; whatever lies between was skipped on this rank, and is
gathered with the others and freed. A unit that lies behind begins a new cycle, after the rest of this one. So ranks may
skip different units, and any order of calls works that is the same on all ranks.

What a visit does, and nothing else does: units before that position are *over*, and resharded; and the unit is waited
for. The next few are sent for while it computes: at once, or as soon as a reduction that was under way has arrived.

The first part of the state is the cycle that is open, a ``Direction`` or none, and the position in it. The table has
what each event makes of it. *ends*: this rank goes through the rest of the cycle first:

=========================  ================  ================  ================
cycle                      none              FORWARD           BACKWARD
=========================  ================  ================  ================
forward: root              FORWARD           ends, FORWARD     ends, FORWARD
forward: ahead             FORWARD           FORWARD           ends, FORWARD
forward: open              --                FORWARD           ends, FORWARD
forward: behind            --                ends, FORWARD     ends, FORWARD
forward: part              FORWARD           FORWARD           ends, FORWARD
root returns               none              ends              ends
unit returns               none              FORWARD           BACKWARD
part returns               none              FORWARD           BACKWARD
backward: ahead            BACKWARD          ends, BACKWARD    BACKWARD
backward: open             --                ends, BACKWARD    BACKWARD
backward: behind           --                ends, BACKWARD    ends, BACKWARD
backward: frozen           BACKWARD          ends, BACKWARD    BACKWARD
backward begins            none              FORWARD           ends
backward is over           none              FORWARD           ends
complete_raised_backward   none              FORWARD           ends
complete_all_backwards     none              ends              ends
reshard_all                none              ends              ends
end_step                   none              FORWARD           BACKWARD
record                     none              FORWARD           BACKWARD
=========================  ================  ================  ================

- *forward*: a unit is called. *backward*: a gradient comes into it, or a checkpoint computes it again.
- *part*: a module of the root is called while no forward of the root is under way. It brings in the root, as a visit
  to any unit does. Where the root is UNSHARDED, and no BACKWARD is open, it changes nothing.
- *ahead*, *open*, *behind*: where the unit is: later in the cycle; visited and not over; or over.
- *frozen*: the unit is not in the backward cycle. It needed no gradient when the order was recorded.
- *forward: root* with a cycle open: what was open has raised. So it is with *backward begins*. A cycle goes on in which
  a part has brought in the root, and nothing else was visited.
- *complete_raised_backward* of a backward that has not raised changes nothing.
- *root returns*: its outermost forward. Where the order is not known, the ranks agree on it then.

The second part is how many backward cycles this rank *owes* to forward cycles that other ranks may come back through:

======================  ================
owed                    becomes
======================  ================
FORWARD ends, trains    one more
FORWARD ends            the same
BACKWARD ends           one less, or 0
complete_all_backwards  0
end_step                0
======================  ================

``complete_all_backwards`` ends the cycle that is open, and goes through what is owed, one cycle for each.

For each optimizer, whether a forward has *announced* a reduction, which a backward may not have come to here:

====================  ================
announced             becomes
====================  ================
FORWARD ends, trains  yes
FORWARD ends          the same
excuse                no
====================  ================

- *excuse*: the optimizer has stepped, or zeroed, or a ``no_sync`` block has ended. All ranks know of it.

Whether backward takes as many cycles as were counted depends on the *course* of the forward cycles:

====================  ============  ============  ============  ============
course                NONE          ROOT          PART          TANGLED
====================  ============  ============  ============  ============
FORWARD begins, root  ROOT          ROOT          TANGLED       TANGLED
FORWARD begins, part  PART          TANGLED       TANGLED       TANGLED
a unit calls another  TANGLED       TANGLED       TANGLED       TANGLED
none is due           NONE          NONE          NONE          NONE
====================  ============  ============  ============  ============

The third part is each unit's own state. What it becomes as the cycle leaves it behind depends on what the unit keeps:

====================  ============  ============  ============
closed in             nothing       all           1/k
====================  ============  ============  ============
FORWARD, trains       SHARDED       UNSHARDED     NODE_SHARDED
FORWARD, evaluates    SHARDED       SHARDED       SHARDED
BACKWARD, comes again SHARDED       UNSHARDED     SHARDED
BACKWARD              SHARDED       SHARDED       SHARDED
held                  UNSHARDED     UNSHARDED     UNSHARDED
====================  ============  ============  ============

- *all* also stays UNSHARDED when it evaluates, where the schedule was made with ``keep_evaluating``.
- *comes again*: the unit has a later position in the same cycle.
- *held*: its forward is under way; or the backward makes a graph, and a backward through it may follow.
"""

from __future__ import annotations

import enum
import weakref
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from ..backward_watch import BackwardWatch
from ..comm.sharding import Sharding
from ..errors import ParameterError, ShardAccessError
from ..params.flat_params import FlatParams
from ..user_thread import UserThread
from .order import calls_ended, merged, nested, over
from .unit import Unit, UnitState

ORDER_CODES = 64
"""How many values the digest of a rank's cycles is told apart by, when ranks compare theirs in ``step``."""

_schedules: list[weakref.ref[UnitSchedule]] = []  # of this process, in the order in which they were made


class Direction(enum.Enum):
    FORWARD = 1
    BACKWARD = 2


class Course(enum.Enum):
    """How the forward cycles went that a backward may come back through: whether it takes as many as they were."""

    NONE = enum.auto()
    ROOT = enum.auto()  # each within a forward of the root
    PART = enum.auto()  # one, of parts or units that were called by themselves
    TANGLED = enum.auto()  # that cannot be told

    def begin(self, by: Course) -> Course:
        """Another cycle begins, ``by`` the ROOT or a PART."""
        return by if self is Course.NONE or (self is by is Course.ROOT) else Course.TANGLED


class Listener(Protocol):
    """Who wants to know how far backward is: a reducer. Only told: what it knows must not decide what is gathered."""

    def backward_moves(self) -> None:
        """Backward goes on to another unit; what it has passed is not over yet."""

    def units_over(self) -> None:
        """More units are over: ``is_over`` says which."""

    def order_known(self) -> None:
        """The order in which backward is through with units is known, ``over_order``."""


class UnitSchedule:
    """The cycles of one model.

    Args:
        units: the root first, the others in the order of ``model.modules()``.
        prefetch: how many units are sent for ahead.
        keep_evaluating: whether units that are kept unsharded after a forward are so where no backward can follow, too.

    Attributes:
        prefetch_count: as given.
        listeners: the reducers of the optimizers that train the model.
        owner: the ``ShardedModel``. Hooks hold the schedule, and so it.
        thread: who uses the model.
    """

    def __init__(self, units: Sequence[Unit], sharding: Sharding, prefetch: int, *, keep_evaluating: bool) -> None:
        self.units, self._sharding, self.prefetch_count = list(units), sharding, prefetch
        self._keep_evaluating = keep_evaluating
        self.listeners: list[Listener] = []
        self.owner: object = None
        self.thread = UserThread()
        self._reducing: set[Listener] = set()  # whose reduction is under way, and had better not be disturbed
        self.watch = BackwardWatch(self._begin_backward, self.complete_backward)
        self._cycles = {
            Direction.FORWARD: list(units),
            Direction.BACKWARD: list(reversed(list(calls_ended(units)))),
        }
        self._forwards = 0  # of the root that are under way
        self._running: list[Unit] = []  # units whose forward is under way
        self._root_trains = False  # whether the outermost of them began with gradients enabled
        self._direction: Direction | None = None  # of the cycle that is open
        self._position = -1  # of the last unit visited in it
        self._open: dict[Unit, int] = {}  # visited in it and not over, and where
        self._trains = False  # whether a backward may follow the forward that is open
        self._begun_by_part = False  # outside of a forward of the root
        self._hold = False  # create_graph: a backward may go through this one; units stay until ``reshard_all``
        self._over: set[FlatParams] = set()  # their gradients are complete in the open or last backward
        self._backwards_due = 0  # forward cycles that a backward may still come back through
        self._announced: set[Listener] = set()  # to whom a forward has announced a reduction
        self._course = Course.NONE  # of the forward cycles since no backward was due
        self._digest = 0
        self._called: list[Unit] = []  # in the forward that is open, but for a unit called twice in a row
        self._ended: list[tuple[Unit, bool]] = []  # with whether what it gave requires a gradient
        self.record()
        _schedules[:] = [*(of for of in _schedules if of() is not None), weakref.ref(self)]

    @property
    def out_of_step(self) -> bool:
        """Whether a gather has failed: the other ranks are at another one."""
        return self._sharding.everyone.out_of_step

    # -- what modules and autograd call --------------------------------------------------------------------------

    def caller_of(self, unit: Unit) -> Unit | None:
        """The unit whose forward is under way and calls this one, which is not within it; None: there is none."""
        caller = self._running[-1] if self._running else unit
        return None if caller is unit or caller in unit.enclosing else caller

    def is_open(self, unit: Unit) -> bool:
        """Whether it was visited in the cycle that is open, and is not over."""
        return unit in self._open

    def is_called(self, unit: Unit) -> bool:
        """Whether a forward of it is under way, or a call that stands in for one."""
        return unit in self._running

    def before_forward(self, unit: Unit, *, part: bool = False) -> None:
        """``unit`` is called; within a backward, by a checkpoint that computes again what was not kept.

        ``part``: a module within it is called, and stands in for it. The root is then visited like any unit: others of
        its parts may be called next, for the same backward.
        """
        if unit.state is UnitState.GATHERED:
            return
        if in_backward():
            self._visit(unit, Direction.BACKWARD, closing=False)  # others of the checkpoint's wait for their backward
            return
        self.thread.note()
        if self._direction is Direction.FORWARD and not self.running:
            self._trains |= torch.is_grad_enabled()  # an evaluation by parts has left the cycle open
        root = unit is self.units[0]
        if root and part and unit.state is UnitState.UNSHARDED and self._direction is not Direction.BACKWARD:
            self._begin_call(unit)  # an earlier part, or the forward before it, has brought it in
            return
        if root and not part:
            self._forwards += 1
            if self._forwards == 1:
                self._root_trains = torch.is_grad_enabled()
                complete_raised_backwards(self.thread)
                if not self._root_alone_by_part:
                    self._end_open()  # a forward that raised
                self._check_in_place()
                self._called, self._ended, self._running = [], [], []
        if unit not in self._open:
            self._called.append(unit)
        if self.caller_of(unit) is not None:
            self._course = Course.TANGLED
        self._visit(unit, Direction.FORWARD, closing=True)
        self._begin_call(unit)  # only now: a visit that ends a backward which has raised reshards this unit, too

    @property
    def _root_alone_by_part(self) -> bool:
        """Whether the cycle that is open was begun by a part of the root, and has come no further."""
        return self._direction is Direction.FORWARD and self._begun_by_part and self._position == 0

    def _begin_call(self, unit: Unit) -> None:
        self._running.append(unit)
        unit.unwatch_parts()

    def _check_in_place(self) -> None:
        """Raise ParameterError where the model was moved or cast while an evaluation had left units unsharded."""
        moved = [label for unit in self.units for label in unit.moved()]
        if moved:
            others = f" and {len(moved) - 1} others" if len(moved) > 1 else ""
            raise ParameterError(
                f"{moved[0]}{others} were moved, cast or given new data after zero_optim.shard_module, and are again "
                "what they were: move or cast the model before"
            )

    def before_backward(self, unit: Unit) -> None:
        """A gradient has come to what ``unit`` returned: the backward of all that was called after it is through."""
        if unit.state is not UnitState.GATHERED:
            self._visit(unit, Direction.BACKWARD, closing=True)

    def _visit(self, unit: Unit, direction: Direction, *, closing: bool) -> None:
        """Go to ``unit`` in the cycle of this direction; begin a new cycle where that is behind.

        ``closing``: units before it are over. Not for a checkpoint that computes again: their backward is to come.
        """
        if direction is Direction.BACKWARD:
            self.watch.enter()
            for listener in self.listeners if closing else ():
                listener.backward_moves()
            self._hold |= closing and torch.is_grad_enabled()  # create_graph=True; a checkpoint computes with it, too
        if direction is not self._direction:
            self._end_open()
            self._begin_cycle(direction)
        cycle = self._cycles[direction]
        if unit in self._open:
            if closing:
                self._close([other for other, position in self._open.items() if position < self._open[unit]], unit)
            return
        if unit not in cycle:  # it needed no gradient when the order was recorded
            if closing:  # not what is within it: where both have returned the same tensor, that may have come first
                self._close([other for other in self._open if unit not in other.enclosing], unit)
            # This unit is in no cycle, so its gather has no turn of its own. Some ranks have prefetched already, others
            # have not. Now all have, and this unit comes next on each.
            self.prefetch_next()
            self._open_unit(unit, self._position)
            return
        if unit not in cycle[self._position + 1 :]:
            self._end_open()
            self._begin_cycle(direction)
        for position in range(self._position + 1, cycle.index(unit, self._position + 1) + 1):
            self._go_to(position, closing=closing)

    def after_forward(self, unit: Unit, *, requires_grad: bool, part: bool = False) -> None:
        """A forward of ``unit`` is through; what it returned does or does not require a gradient."""
        if unit.state is UnitState.GATHERED or in_backward() or (part and unit is self.units[0]):
            return
        checkpointed = self._trains and not torch.is_grad_enabled()  # re-entrant: backward calls it again
        self._ended.append((unit, requires_grad or checkpointed))
        if unit is self.units[0] and not self.running:
            self._end_open()
            if not self._forward_known or (self._trains and not self._backward_known):
                self._agree_on_order()

    def forward_ended(self, unit: Unit, *, part: bool = False) -> None:
        """A forward of ``unit`` is through, or has raised. To be called before ``after_forward``."""
        if unit in self._running:
            self._running.pop()
            if unit not in self._running:
                unit.watch_parts()
        if unit is self.units[0]:
            self._forwards = max(0, self._forwards - (not part))
        elif unit not in self._open and unit.state is UnitState.UNSHARDED and not self._kept_after_forward(unit):
            self._reshard_after_forward(unit)  # a backward within its forward has gone through it

    @property
    def running(self) -> bool:
        """Whether a forward of the root is under way."""
        return self._forwards > 0

    def complete_backward(self) -> None:
        """Collective, where one is open: join what is left of it."""
        if self._direction is Direction.BACKWARD:
            self._end_cycle()
            self._backwards_due -= 1
            if self._backwards_due <= 0:
                self._none_due()

    def complete_raised_backward(self) -> None:
        """Collective, where one has raised here, and no other has begun since."""
        if self._direction is Direction.BACKWARD and not self.watch.running:
            self.complete_backward()

    # -- what the optimizer calls --------------------------------------------------------------------------------

    def complete_all_backwards(self) -> None:
        """Collective, from ``step``. End the cycle that is open; then go through one whole cycle for each backward due.

        A forward with gradients makes one due. If this rank's backward raised before it came to a unit, nothing has
        begun here, while other ranks wait in the gathers of theirs.
        """
        self._end_open()  # it may be a forward that raised
        while self._backwards_due:
            self._begin_cycle(Direction.BACKWARD)
            self.complete_backward()

    def is_announced(self, to: Listener) -> bool:
        """Whether there was a forward that trains since it was last excused: the same on all ranks."""
        return to in self._announced or (self._direction is Direction.FORWARD and self._trains)

    def excuse(self, listener: Listener) -> None:
        """The forwards so far announce no reduction to it any more."""
        self._announced.discard(listener)

    def reshard_all(self) -> None:
        """Collective, where a cycle is open. End it, and reshard every unit but those of ``gather_parameters``."""
        self._end_open()
        self._hold = False
        for unit in self.units:
            unit.reshard()

    def check_not_gathered(self, what: str = "step") -> None:
        """Raise ShardAccessError within ``gather_parameters``: what it shows would not be what is updated."""
        if any(unit.state is UnitState.GATHERED for unit in self.units):
            raise ShardAccessError(f"{what} was called within gather_parameters: leave that before, on every rank")

    def prefetch_next(self) -> None:
        """Start to gather the next units of the cycle that is open, as far as their turn has come.

        Ranks need not do so at the same time: whenever it is, each unit is gathered in its turn. One that also
        has an earlier turn may be resharded after that, and gathered again: it waits, and so do those behind it.
        """
        self._prefetch_units(self.prefetch_count)

    def prefetch_rest_of_backward(self) -> None:
        """Start the gathers that are left of a backward that is open, as far as units are not gathered twice in it."""
        if self._direction is Direction.BACKWARD:
            self._prefetch_units(None)

    def _prefetch_units(self, count: int | None) -> None:
        if self._direction is None:
            return
        earlier: set[Unit] = set()  # whose turn comes before
        for ahead in self._cycles[self._direction][self._position + 1 :][:count]:
            if ahead.state is UnitState.UNSHARDED or ahead in earlier:
                break
            ahead.unshard()
            earlier.add(ahead)

    def reduction_begins(self, of: Listener) -> None:
        """The host is going to wait for a reduction (gloo). Do not prefetch beside it: gathers would slow it down on
        the same threads, and take memory. They start when it has arrived, or at the latest when a unit is visited."""
        self._reducing.add(of)

    def reductions_arrived(self, of: Listener) -> None:
        """No reduction of this reducer is under way any more."""
        if of in self._reducing:
            self._reducing.remove(of)
            if not self._reducing and self._direction is Direction.BACKWARD:
                self.prefetch_next()

    def remove(self, listener: Listener) -> None:
        """It is closed: nobody waits for its reductions."""
        self.listeners.remove(listener)
        self._reducing.discard(listener)
        self._announced.discard(listener)

    def is_over(self, flat: FlatParams) -> bool:
        """Whether the backward that is open, or the last, can bring no more gradients to these parameters."""
        return flat in self._over

    def end_step(self) -> None:
        self._none_due()

    def record(self) -> None:
        """Learn the order anew, from the next forward of the root, and that of backward from the next that trains."""
        self._forward_known = self._backward_known = False

    @property
    def order_code(self) -> int:
        """The same on all ranks that have gone through the same cycles; else, as a rule, another."""
        return self._digest % ORDER_CODES

    @property
    def over_order(self) -> list[Unit]:
        """Units in the order in which a backward is through with them."""
        last: dict[Unit, None] = {}
        for unit in over(self._cycles[Direction.BACKWARD]):
            last.pop(unit, None)
            last[unit] = None
        return [*last, *(unit for unit in self.units if unit not in last)]

    # -- cycles --------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self.complete_backward()  # one that is open has raised

    def _begin_cycle(self, direction: Direction) -> None:
        self._direction, self._position = direction, -1
        self._digest = zlib.crc32(bytes([direction.value]), self._digest)
        if direction is Direction.FORWARD:
            self._begun_by_part = not self.running
            if self._begun_by_part:
                self._called, self._ended = [], []  # a model that is called by parts alone agrees on no order
            self._course = self._course.begin(Course.PART if self._begun_by_part else Course.ROOT)
            # A re-entrant checkpoint within the root's forward disables gradients, and still is trained.
            self._trains = torch.is_grad_enabled() or (self.running and self._root_trains)
            for unit in self.units:
                if unit.state is UnitState.NODE_SHARDED:  # no backward came, and shards may have been written since
                    unit.reshard()
        else:
            self._over.clear()

    def _end_open(self) -> None:
        if self._direction is Direction.BACKWARD:
            self.complete_backward()
        elif self._direction is Direction.FORWARD:
            self._end_cycle()

    def _end_cycle(self) -> None:
        assert self._direction is not None
        cycle = self._cycles[self._direction]
        for position in range(self._position + 1, len(cycle)):
            self._go_to(position, closing=True)
        self._close([*self._open])
        if self._direction is Direction.FORWARD and self._trains:
            self._backwards_due += 1
            self._announced.update(self.listeners)
        self._direction = None

    def _go_to(self, position: int, *, closing: bool) -> None:
        assert self._direction is not None
        cycle = self._cycles[self._direction]
        if closing:
            self._close([*self._open], cycle[position])
        self._position = position
        self._open_unit(cycle[position], position)
        if not self._reducing:
            self.prefetch_next()

    def _open_unit(self, unit: Unit, position: int) -> None:
        unit.unshard()
        if self._direction is Direction.BACKWARD:
            prefetch_rest_of_backwards(self.thread, but=self)
        unit.wait()
        self._open[unit] = position

    def _close(self, units: Sequence[Unit], but: Unit | None = None) -> None:
        """These are over, those within others first; not ``but``, and what it is within."""
        kept = set() if but is None else {but, *but.enclosing}
        for unit in sorted(set(units) - kept, key=lambda unit: -len(unit.enclosing)):
            del self._open[unit]
            held = self._hold or unit in self._running
            if self._direction is Direction.FORWARD:
                if not held and not self._kept_after_forward(unit):
                    self._reshard_after_forward(unit)
                continue
            again = unit in self._cycles[Direction.BACKWARD][self._position + 1 :]
            if not held and not (unit.keep and again):
                unit.reshard()
            if not again and not self._hold and self._is_last_backward_cycle:
                self._over.update(unit.flats)
                for listener in self.listeners:
                    listener.units_over()

    @property
    def _is_last_backward_cycle(self) -> bool:
        """Whether the cycle that is open is known to be the last before backward ends.

        With two forwards before one backward, the first cycle back is not the last. The second brings more gradients to
        the same parameters: a bucket that was launched by then would miss them. How many come is not known

        - of a graph that is gone through again;
        - where parts were called in several cycles: a re-entrant checkpoint makes none due;
        - where a unit has called another: backward comes back to the first;
        - where the order of the forward alone is known: a unit that is in it twice takes two cycles back.
        """
        counted = self._course is not Course.TANGLED and (self._backward_known or not self._forward_known)
        return counted and self._backwards_due == 1

    def _none_due(self) -> None:
        self._backwards_due, self._course = 0, Course.NONE

    def _kept_after_forward(self, unit: Unit) -> bool:
        """Whether it is left unsharded after its forward."""
        return unit.keep and (self._trains or self._keep_evaluating)

    def _reshard_after_forward(self, unit: Unit) -> None:
        unit.reshard(to_node=unit.node is not None and self._trains and self._direction is Direction.FORWARD)

    # -- the order -----------------------------------------------------------------------------------------------

    def _agree_on_order(self) -> None:
        """Collective. Take rank 0's order, and have in it what other ranks, or none, have used."""
        number = {unit: index for index, unit in enumerate(self.units)}
        report = ([number[unit] for unit in self._called], [(number[u], needs) for u, needs in self._ended])
        reports = self._sharding.everyone.gather_objects(report, "the first forward")
        known = nested(self._cycles[Direction.FORWARD])  # where an earlier forward was seen, in its order
        orders = [[self.units[index] for index in called] for called, _ in reports]
        self._cycles[Direction.FORWARD] = merged(orders, known)
        self._forward_known = True
        if self._trains:
            useless = {index for _, ended in reports for index, needs in ended if not needs}
            useless -= {index for _, ended in reports for index, needs in ended if needs}
            needed = [unit for unit in reversed(calls_ended(known)) if number[unit] not in useless]
            orders = [[self.units[index] for index, _ in reversed(of) if index not in useless] for _, of in reports]
            self._cycles[Direction.BACKWARD] = merged(orders, needed)
            self._backward_known = True
            for listener in self.listeners:
                listener.order_known()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _used_by(thread: UserThread) -> list[UnitSchedule]:
    """Not those in which a gather has failed: what is open there stays so."""
    alive = [schedule for reference in _schedules if (schedule := reference()) is not None]
    return [schedule for schedule in alive if thread.may_complete(schedule.thread) and not schedule.out_of_step]


def prefetch_rest_of_backwards(thread: UserThread, but: UnitSchedule | None = None) -> None:
    """Start all gathers that are left of the thread's backwards, before it waits for something else in one.

    It may have skipped units, and would gather them as backward ends. Another rank waits for them before it comes to
    what this one is about to wait for::

        rank 0   B 2    B 1: waits for rank 1    A 1
        rank 1   B 2    (has not called B 1)     A 1: waits for rank 0

    As a rule nothing is left. ``but``: a schedule that is about to wait for its own.
    """
    for schedule in _used_by(thread):
        if schedule is not but:
            schedule.prefetch_rest_of_backward()


def complete_raised_backwards(thread: UserThread) -> None:
    """Collective. End the backward cycles that a raise has left open here, of all models of the thread: before it waits
    for something else, in a forward or in another backward. Other ranks wait in them::

        rank 0   backward of A: raises in unit 2                       forward of B: joins A's gathers first
        rank 1   backward of A: waits for rank 0 to gather unit 1      forward of B
    """
    for schedule in _used_by(thread):
        schedule.complete_raised_backward()
