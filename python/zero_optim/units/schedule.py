"""Decides when a unit is unsharded: one fixed order of gathers on every rank, whatever a rank's forward uses.

A *cycle* goes once through all units: a forward cycle in the order in which a forward calls them, a backward cycle in
the order in which a backward comes back to them. Ranks gather by position in the cycle alone, so they agree without
communicating. Entering a unit goes through the positions up to its own, gathers and frees the units that this rank has
skipped, reshards every unit before it, then waits for its all-gather. The gathers of the next few units run while it
computes. A unit that lies behind begins a new cycle, after the rest of this one. So ranks may skip different units, and
any order of calls works that is the same on all ranks.

``tests/units/test_schedule_cells.py`` has the tables of events: which cycle is open, and what becomes of a unit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Protocol

import torch

from ..comm.sharding import Sharding
from ..errors import OffloadError, ParameterError, ShardAccessError, ZeroOptimError
from ..mode import ASLEEP
from ..params.flat_params import FlatParams
from ..recovery import BackwardWatch, Owing, all_of, complete_raised
from ..stores.disk_pages import DiskBacking
from ..user_thread import UserThread
from .cycle import BackwardsDue, Calls, Cycle, Known, Orders, Pass, Prefetch
from .unit import Unit, UnitState


class Listener(Protocol):
    """A reducer, which follows how far backward is. It must not decide what is gathered."""

    def backward_moves(self) -> None:
        """Backward goes on to another unit; the units that it has passed are not over yet."""

    def units_over(self) -> None:
        """More units are over: see ``is_over``."""

    def order_known(self) -> None:
        """``orders.over`` is known, in which backward is through with units."""


class UnitSchedule(Owing):
    """Visits the units of one model as its modules and autograd call them.

    Args:
        units: the root first, the others in the order of ``model.modules()``.
        prefetch: how many units are gathered ahead.
        keep_evaluating: whether units that stay unsharded after a forward do so where no backward can follow, too.

    Attributes:
        cycle: the one that is open.
        calls: the running forwards.
        orders: of the cycles.
        due: the backward cycles that may follow the forwards so far.
        prefetch: starts gathers ahead of the visits.
        listeners: the reducers of the optimizers that train the model.
        owner: the ``ShardedModel``, which lives while hooks hold the schedule.
        disk: that on which shards rest; None: they are on none.
        sleeping: one entry for each optimizer that sleeps, and has the parameters off the device.
    """

    turn = 2  # after the rounds: those with units complete their schedule themselves

    def __init__(self, units: Sequence[Unit], sharding: Sharding, prefetch: int, *, keep_evaluating: bool) -> None:
        # A cycle that is open as a backward begins is of one that has raised.
        super().__init__(UserThread(), BackwardWatch(self.complete_backward, self.complete_backward))
        self.units, self._sharding, self._keep_evaluating = list(units), sharding, keep_evaluating
        self.cycle = Cycle()
        self.calls = Calls()
        self.orders = Orders(units, sharding)
        self.due = BackwardsDue()
        self.prefetch = Prefetch(self.cycle, prefetch)
        self.listeners: list[Listener] = []
        self.owner: Any = None
        self.sleeping: set[object] = set()
        self.disk: DiskBacking | None = None
        self._holds = False  # create_graph: a backward may go through this one; units stay until ``reshard_all``
        self._over: set[FlatParams] = set()  # their gradients are complete in the open or last backward

    @property
    def out_of_step(self) -> bool:
        return self._sharding.world.out_of_step

    # -- what modules and autograd call --------------------------------------------------------------------------

    def before_forward(self, unit: Unit, *, part: bool = False) -> None:
        """Visit ``unit``, which is called. Within a backward a checkpoint calls it, to compute again.

        ``part``: a module within it is called, and stands in for it. The root is then visited like any unit: others of
        its parts may be called next, for the same backward.
        """
        if self.sleeping:
            self.check_awake(f"the forward of {unit.label}")
        if unit.state is UnitState.GATHERED:
            return
        if in_backward():
            self._visit(unit, Pass.BACKWARD, closing=False)  # the checkpoint's other units await their backward
            return
        self.thread.note()
        # An evaluation by parts leaves its cycle open. If the next part that is called trains, a backward may follow.
        if self.cycle.direction is Pass.FORWARD and not self.calls.in_root:
            self.calls.trains |= torch.is_grad_enabled()
        root = unit is self.units[0]
        if root and part and unit.state is UnitState.UNSHARDED and self.cycle.direction is not Pass.BACKWARD:
            self.calls.begin(unit)  # an earlier part, or the forward before it, has brought it in
            return
        if root and not part and self.calls.root_begins():
            self._outermost_forward_begins()
        if unit not in self.cycle.open:
            self.orders.called.append(unit)
        if self.calls.caller_of(unit) is not None:
            self.due.nested = True
        self._visit(unit, Pass.FORWARD, closing=True)
        self.calls.begin(unit)  # only now: a visit that ends a backward which has raised reshards this unit, too

    def _outermost_forward_begins(self) -> None:
        complete_raised(self.thread)
        # A cycle that is open has raised; but one in which a part has brought in the root, and nothing else, goes on.
        root_alone_by_part = self.calls.by_part and self.cycle.position == 0
        if not (self.cycle.direction is Pass.FORWARD and root_alone_by_part):
            self._complete_open()
        self.orders.called, self.orders.ended = [], []
        self.calls.running.clear()  # they have raised, and no hook has ended them
        # The model may be moved or cast while an evaluation has left units unsharded.
        moved = [label for unit in self.units for label in unit.moved()]
        if moved:
            others = f" and {len(moved) - 1} others" if len(moved) > 1 else ""
            raise ParameterError(
                f"{moved[0]}{others} were moved, cast or given new data after zero_optim.shard_module. The forward has "
                "undone that, as units compute in memory of their own. Move or cast the model before shard_module; "
                "write values within zero_optim.gather_parameters(model, writeback=True)"
            )

    def forward_ended(self, unit: Unit, *, part: bool = False) -> None:
        """Record that a forward of ``unit`` is over, or has raised. Comes before ``after_forward``."""
        root = unit is self.units[0]
        self.calls.end(unit, is_root=root and not part)
        # The unit is unsharded and in no open cycle: a backward within its forward went through it, and left it to us.
        if not root and unit not in self.cycle.open and unit.state is UnitState.UNSHARDED:
            self._reshard_after_forward(unit)

    def after_forward(self, unit: Unit, *, requires_grad: bool, part: bool = False) -> None:
        """End a forward of ``unit``. ``requires_grad``: whether what it returned does. The root's ends the cycle."""
        if unit.state is UnitState.GATHERED or in_backward() or (part and unit is self.units[0]):
            return
        checkpointed = self.calls.trains and not torch.is_grad_enabled()  # re-entrant: backward calls it again
        self.orders.ended.append((unit, requires_grad or checkpointed))
        if unit is self.units[0] and not self.calls.in_root:
            self._complete_open()
            trains, known = self.calls.trains, self.orders.known
            if known is Known.NOTHING or (trains and known is Known.FORWARD):
                self.orders.agree(trains=trains)
                for listener in self.listeners if trains else ():
                    listener.order_known()

    def before_backward(self, unit: Unit) -> None:
        """Visit ``unit``: a gradient has come to what it returned, so backward is through with all called after it."""
        if unit.state is not UnitState.GATHERED:
            self._visit(unit, Pass.BACKWARD, closing=True)

    # -- what the optimizer calls --------------------------------------------------------------------------------

    def complete_backward(self) -> None:
        """Collective, where a backward cycle is open: go through the rest of it."""
        if self.cycle.direction is Pass.BACKWARD:
            self._complete_open()

    def complete_raised(self) -> None:
        # A new backward that runs has ended the cycle of one that raised, as it began: what is open is its own.
        if not self.watch.running:
            self.complete_backward()

    def complete_all_backwards(self) -> None:
        """Collective. Complete the cycle that is open; then go through one for each backward that is due."""
        self._complete_open()  # it may be a forward that raised
        while self.due.count:
            self._begin_cycle(Pass.BACKWARD)
            self.complete_backward()

    def gather_ahead(self, stale: Container[FlatParams]) -> None:
        """Collective. Start the gathers with which the next forward begins, of the root and of the first unit, as far
        as nothing in them is ``stale``: ``step`` has yet to update it."""
        for unit in self.orders.forward[:2] if self.orders.known is not Known.NOTHING else ():
            if any(flat in stale or not flat.sharded or flat.offloaded for flat in unit.flats):
                return
            unit.unshard(ahead=True)

    def drop_ahead(self) -> None:
        """Free what was gathered ahead of a forward that has not begun."""
        for unit in self.units:
            if unit.ahead is not None:
                unit.reshard()

    def reshard_all(self) -> None:
        """Collective, where a cycle is open. Complete it, and reshard every unit outside ``gather_parameters``."""
        self._complete_open()
        self._holds = False
        for unit in self.units:
            unit.reshard()

    def is_over(self, flat: FlatParams) -> bool:
        """True if the backward that is open, or the last, can bring no more gradients to these parameters."""
        return flat in self._over

    def check_not_gathered(self, what: str = "step") -> None:
        """Raise ShardAccessError within ``gather_parameters``: what it shows would not be what is updated."""
        self.check_awake(what)
        if any(unit.state is UnitState.GATHERED for unit in self.units):
            raise ShardAccessError(f"{what} was called within gather_parameters: leave that before, on every rank")

    def check_awake(self, what: str) -> None:
        """Raise ZeroOptimError where the parameters are asleep: there is nothing to gather."""
        if self.sleeping:
            raise ZeroOptimError(f"{what}: {ASLEEP}, whose parameters are the model's")

    # -- visits ----------------------------------------------------------------------------------------------------

    def _visit(self, unit: Unit, direction: Pass, *, closing: bool) -> None:
        """Go to ``unit`` in the cycle of this direction; begin a new cycle where the unit is behind.

        ``closing``: units before it are over, unless a checkpoint computes again and their backward is to come.
        """
        if direction is Pass.BACKWARD:
            self.watch.enter()
            for listener in self.listeners if closing else ():
                listener.backward_moves()
            self._holds |= closing and torch.is_grad_enabled()  # create_graph=True; a checkpoint computes with it, too
        cycle = self.cycle
        if direction is not cycle.direction:
            self._complete_open()
            self._begin_cycle(direction)
        # It was visited already, so it is here. As a gradient comes into it, the units before it are over.
        if unit in cycle.open and not (direction is Pass.FORWARD and cycle.left_behind(unit)):
            if closing:
                self._close_before(unit, [other for other in cycle.open if cycle.open[other] < cycle.open[unit]])
            return
        if unit not in cycle.order:  # it needed no gradient when the order was recorded
            if closing:
                self._close_before(unit, cycle.open)
            # Its gather has no turn of its own. Some ranks have prefetched already, others have not. Now all have, and
            # this unit comes next on each.
            self.prefetch.start_next()
            self._open_unit(unit, cycle.position)
            return
        # It is behind: all ranks go through the rest of this cycle before they begin another.
        if unit not in cycle.ahead:
            self._complete_open()
            self._begin_cycle(direction)
        for position in range(cycle.position + 1, cycle.order.index(unit, cycle.position + 1) + 1):
            self._go_to(position, closing=closing)

    def _go_to(self, position: int, *, closing: bool) -> None:
        unit = self.cycle.order[position]
        if closing:
            self._close_before(unit, self.cycle.open)
        self.cycle.position = position
        if self.disk is not None:
            self.prefetch.read_ahead()
        self._open_unit(unit, position)
        self.prefetch.start_next(experts_alone=bool(self.prefetch.reducing))

    def _open_unit(self, unit: Unit, position: int) -> None:
        unit.unshard()
        # The host is about to wait. Another model's backward may have gathers left that other ranks wait for.
        if self.cycle.direction is Pass.BACKWARD:
            prefetch_rest_of_backwards(self.thread, but=self)
        unit.wait()
        self.cycle.open[unit] = position
        if unit is self.cycle.stayed:
            self.cycle.stayed = None

    def _close_before(self, unit: Unit, opened: Iterable[Unit]) -> None:
        """Close the units of ``opened`` that are over as a visit comes to ``unit``: all but itself and those around it.

        An inner unit is not over if it, or ``unit``, is not in the cycle: both may have returned the same tensor, and
        then the inner one's hook comes first. Where both are in the cycle, the inner one comes after.
        """
        # A rank without tokens does not come to experts. So others launch nothing there: between two collectives of the
        # model's own all ranks launch the same, as NCCL wants it. Until orders are known, what is left open would be
        # missing among the units that are called later.
        if unit.of_experts and self.orders.known is not Known.NOTHING:
            return
        order, kept = self.cycle.order, {unit, *unit.enclosing}
        over = [other for other in opened if unit not in other.enclosing or (unit in order and other in order)]
        self._close([other for other in over if other not in kept])

    def _close(self, units: Iterable[Unit]) -> None:
        for unit in sorted(units, key=lambda unit: -len(unit.enclosing)):
            del self.cycle.open[unit]
            held = self._holds or unit in self.calls.running
            if self.cycle.direction is Pass.FORWARD:
                if not held:
                    self._reshard_after_forward(unit)
                continue
            again = unit in self.cycle.ahead
            if not held and not (unit.keep and again):
                unit.reshard()
            # Only where no more gradients can come: reducers launch what is over at once.
            if not again and not self._holds and self.due.is_last(self.orders.known):
                self._over.update(unit.flats)
                for listener in self.listeners:
                    listener.units_over()

    def _reshard_after_forward(self, unit: Unit) -> None:
        if unit.keep and (self.calls.trains or self._keep_evaluating):
            return
        backward_follows = self.calls.trains and self.cycle.direction is Pass.FORWARD
        if backward_follows and unit is self.orders.last and not self.cycle.ahead:
            self.cycle.stayed = unit  # backward begins with it, and would gather it again at once
            return
        unit.reshard(to_node=unit.node is not None and backward_follows)

    # -- cycles --------------------------------------------------------------------------------------------------

    def _begin_cycle(self, direction: Pass) -> None:
        self.cycle.begin(direction, self.orders.backward if direction is Pass.BACKWARD else self.orders.forward)
        if direction is Pass.BACKWARD:
            self._over.clear()
            return
        self.calls.cycle_begins()
        if self.calls.by_part:
            self.orders.called, self.orders.ended = [], []  # a model that is called by parts alone agrees on no order
        self.due.forward_begins(by_part=self.calls.by_part)
        for unit in self.units:
            # No backward came, and shards may have been written since.
            if unit.state is UnitState.NODE_SHARDED or unit is self.cycle.stayed:
                unit.reshard()
        self.cycle.stayed = None

    def _complete_open(self) -> None:
        """Collective, where a cycle is open: go through the rest of it."""
        direction = self.cycle.direction
        if direction is None:
            return
        for position in range(self.cycle.position + 1, len(self.cycle.order)):
            self._go_to(position, closing=True)
        self._close(self.cycle.open)
        self.cycle.direction = None
        if direction is Pass.BACKWARD:
            self.due.count -= 1
            if self.due.count <= 0:  # a re-entrant checkpoint makes none due, and takes a cycle all the same
                self.due.reset()
        elif self.calls.trains:
            self.due.count += 1
        elif self.disk is not None:  # no step follows, which would raise what the disk has recorded
            device = self._sharding.device
            with self._sharding.world.raising_together("a forward", device, elsewhere=OffloadError):
                self.disk.check()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def prefetch_rest_of_backwards(thread: UserThread, but: UnitSchedule | None = None) -> None:
    """Start all gathers that are left of the thread's backwards, before it waits for something else in one.

    This rank may have skipped units, and would gather them only as backward ends. Another rank waits for them before it
    comes to what this one is about to wait for::

        rank 0   B 2    B 1: waits for rank 1    A 1
        rank 1   B 2    (has not called B 1)     A 1: waits for rank 0
    """
    for schedule in all_of(UnitSchedule, left_to=thread):
        if schedule is not but and schedule.cycle.direction is Pass.BACKWARD:
            schedule.prefetch.start(schedule.cycle.ahead)
