"""Every cell of the state tables of ``UnitSchedule``, which are these.

The cycle that is open, a ``Pass`` or none. *ends*: this rank goes through the rest of the cycle first:

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
complete_raised            none              FORWARD           ends
complete_all_backwards     none              ends              ends
reshard_all                none              ends              ends
due.reset                  none              FORWARD           BACKWARD
orders.record              none              FORWARD           BACKWARD
=========================  ================  ================  ================

- *forward*: a unit is called. *backward*: a gradient comes into it, or a checkpoint computes it again.
- *part*: a module of the root is called while no forward of the root is under way. It brings in the root, as a visit
  to any unit does. Where the root is UNSHARDED, and no BACKWARD is open, it changes nothing.
- *ahead*, *open*, *behind*: where the unit is: later in the cycle; visited and not over; or over.
- *frozen*: the unit is not in the backward cycle. It needed no gradient when the order was recorded.
- *forward: root* with a cycle open, *backward begins* with BACKWARD open: whatever opened that cycle has raised. There
  is one exception: a forward cycle in which a part has brought in the root, and nothing else was visited, goes on.
- *complete_raised* of a backward that has not raised changes nothing.
- *root returns*: its outermost forward. Where the order is not known, the ranks agree on it then.

What becomes of a unit as the cycle leaves it behind, by what the unit keeps:

====================  ============  ============  ============
closed in             nothing       all           1/k
====================  ============  ============  ============
FORWARD, trains       SHARDED       UNSHARDED     NODE_SHARDED
FORWARD, evaluates    SHARDED       SHARDED       SHARDED
BACKWARD, comes again SHARDED       UNSHARDED     SHARDED
BACKWARD              SHARDED       SHARDED       SHARDED
held                  UNSHARDED     UNSHARDED     UNSHARDED
====================  ============  ============  ============

- The unit with which BACKWARD begins stays UNSHARDED, whatever it keeps, if it ends a FORWARD that trains, and the
  orders are known. (Here FROZEN comes after it.) Another FORWARD first makes it SHARDED.
- *all* also stays UNSHARDED when it evaluates, where the schedule was made with ``keep_evaluating``.
- *comes again*: the unit has a later position in the same cycle.
- *held*: its forward is under way; or the backward makes a graph, and a backward through it may follow.

The backward cycles that are *due*: one for each forward cycle that other ranks may come back through.
``complete_all_backwards`` ends the cycle that is open, and goes through what is due, one cycle for each:

======================  ================
due                     becomes
======================  ================
FORWARD ends, trains    one more
FORWARD ends            the same
BACKWARD ends           one less, or 0
complete_all_backwards  0
due.reset               0
======================  ================

The orders that are *known*. They are agreed on where more can be learned, so never in a cell of *--*:

=================  =========  =========  =========
known              NOTHING    FORWARD    BOTH
=================  =========  =========  =========
agree: trains      BOTH       BOTH       --
agree: evaluates   FORWARD    --         --
record             NOTHING    NOTHING    NOTHING
=================  =========  =========  =========
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakValueDictionary

import pytest
import torch
from tables import table
from torch import nn
from zero_optim import recovery
from zero_optim.units import schedule as module
from zero_optim.units.cycle import Known, Pass
from zero_optim.units.schedule import UnitSchedule
from zero_optim.units.unit import Unit, UnitState

CYCLE = table(__doc__, "cycle")
DUE = table(__doc__, "due")
KNOWN = table(__doc__, "known")
CLOSED = table(__doc__, "closed in")
ROOT, A, B, C, FROZEN = range(5)
FORWARD, BACKWARD = [ROOT, A, B, C, FROZEN], [ROOT, C, B, A]  # the root is around the others


class FakeComm:
    """One rank."""

    out_of_step = False

    @property
    def world(self) -> FakeComm:
        return self

    def gather_objects(self, value: object, where: str) -> list[object]:
        return [value]


@dataclass(eq=False)
class FakeFlat:
    """A unit's parameters, of which each gather is noted."""

    unit: int
    gathers: list[int]
    params: list[Any] = field(default_factory=list)
    sharded = True
    sharding = SimpleNamespace(of_experts=False)
    memory = SimpleNamespace(order_after_copy=lambda: None)

    def unshard(self, node: object) -> None:
        self.gathers.append(self.unit)

    def moved(self) -> list[Any]:
        return []

    def show(self) -> None:
        pass

    def reshard(self, node: object) -> None:
        pass


class FakeWatch:
    """Of backwards, which begin and end by hand."""

    def __init__(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.on_begin, self.on_end = on_begin, on_end

    running = True  # as in a backward that has not raised

    def enter(self) -> None:
        pass


class Bench:
    """The schedule of one rank, after a step in which every unit was used. Modules and autograd are played by hand.

    Args:
        keep: which units stay unsharded after their forward.
        on_node: which units keep 1/k of their parameters after their forward.
        twice: which unit every forward calls once more, at its end.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        prefetch: int = 0,
        keep: Sequence[int] = (),
        on_node: Sequence[int] = (),
        keep_evaluating: bool = False,
        twice: int | None = None,
    ) -> None:
        self.in_backward = False
        monkeypatch.setattr(module, "in_backward", lambda: self.in_backward)
        monkeypatch.setattr(module, "BackwardWatch", FakeWatch)
        monkeypatch.setattr(recovery, "_owing", WeakValueDictionary())  # of this bench alone
        self.gathers: list[int] = []
        self.units: list[Unit] = []
        comm: Any = FakeComm()
        for number in FORWARD:
            node: Any = comm if number in on_node else None
            unit = Unit(str(number), nn.Module(), [], node, keep=number in keep)
            flat: Any = FakeFlat(number, self.gathers)
            unit.flats = [flat]
            unit.enclosing = {self.units[ROOT]} if number else set()
            self.units.append(unit)
        self.schedule = UnitSchedule(self.units, comm, prefetch, keep_evaluating=keep_evaluating)
        self.calls = [*FORWARD[1:], *([] if twice is None else [twice])]
        self.whole_forward()
        self.backward_to(len(BACKWARD) - 1)
        self.end_backward()
        self.schedule.reshard_all()
        self.schedule.due.reset()
        self.gathers.clear()

    # -- what modules and autograd do --------------------------------------------------------------------------------

    def call(self, number: int) -> None:
        unit = self.units[number]
        self.schedule.before_forward(unit)
        assert unit.state is UnitState.UNSHARDED
        self.schedule.forward_ended(unit)
        self.schedule.after_forward(unit, requires_grad=torch.is_grad_enabled() and number != FROZEN)

    def forward_to(self, place: int) -> None:
        """A forward of the root that raises after so many calls."""
        self.schedule.before_forward(self.units[ROOT])
        for number in self.calls[:place]:
            self.call(number)
        self.schedule.forward_ended(self.units[ROOT])

    def whole_forward(self) -> None:
        self.forward_to(len(self.calls))
        self.schedule.after_forward(self.units[ROOT], requires_grad=torch.is_grad_enabled())

    def gradient(self, number: int, *, create_graph: bool = False) -> None:
        self.in_backward = True
        with torch.set_grad_enabled(create_graph):
            self.schedule.before_backward(self.units[number])
        self.in_backward = False

    def compute_again(self, number: int) -> None:
        self.in_backward = True
        self.schedule.before_forward(self.units[number])
        self.in_backward = False

    def backward_to(self, place: int) -> None:
        for number in BACKWARD[: place + 1]:
            self.gradient(number)

    def end_backward(self) -> None:
        watch: Any = self.schedule.watch
        watch.on_end()

    def raises(self) -> None:
        """The backward that was under way does not go on."""
        watch: Any = self.schedule.watch
        watch.running = False

    def begin_backward(self) -> None:
        watch: Any = self.schedule.watch
        watch.on_begin()

    # -- the state ---------------------------------------------------------------------------------------------------

    @property
    def cycle(self) -> str:
        return "none" if self.schedule.cycle.direction is None else self.schedule.cycle.direction.name

    @property
    def due(self) -> int:
        return self.schedule.due.count

    def bring(self, cycle: str, place: int, *, due: int = 0) -> None:
        """Open this cycle at this place. ``due``: how many backwards are, beside that of a BACKWARD cycle itself."""
        self.gathers.clear()
        for _ in range(due):
            self.whole_forward()
        if cycle == "FORWARD":
            self.forward_to(place)
        elif cycle == "BACKWARD":
            self.whole_forward()
            self.backward_to(place)
        assert self.cycle == cycle and self.due == due + (cycle == "BACKWARD")


def about(event: str, cycle: str, place: int) -> list[int | None]:
    """The units that such an event can be about, as "forward: behind" with this cycle open at this place."""
    called, _, where = event.partition(": ")
    if not where:
        return [None]
    if where in ("root", "part", "frozen"):
        return [FROZEN if where == "frozen" else ROOT]
    name, order = ("FORWARD", FORWARD) if called == "forward" else ("BACKWARD", BACKWARD)
    if cycle != name:  # there is no place in this order yet: a unit is as good as another
        return [number for number in order if number != ROOT]
    return {"ahead": order[place + 1 :], "open": order[max(1, place) : place + 1], "behind": order[1:place]}[where]  # type: ignore[return-value]


def happens(bench: Bench, event: str, number: int | None, *, again: bool = False) -> None:
    """Let it happen. ``number``: the unit that it is about. ``again``: a checkpoint computes it."""
    if number is not None and event.startswith("forward: "):
        bench.schedule.before_forward(bench.units[number], part=event == "forward: part")
    elif number is not None:
        (bench.compute_again if again else bench.gradient)(number)
    elif event == "root returns":
        bench.schedule.after_forward(bench.units[ROOT], requires_grad=True)
    elif event == "unit returns":
        bench.schedule.after_forward(bench.units[A], requires_grad=True)
    elif event == "part returns":
        bench.schedule.after_forward(bench.units[ROOT], requires_grad=True, part=True)
    elif event == "backward begins":
        bench.begin_backward()
    elif event == "backward is over":
        bench.end_backward()
    else:
        if event == "complete_raised":
            bench.raises()
        operator.attrgetter(event)(bench.schedule)()


def test_the_tables_have_every_state_and_every_event():
    assert {cycle for _, cycle in CYCLE} == {"none", *(direction.name for direction in Pass)}
    methods = {name for name, value in vars(UnitSchedule).items() if callable(value) and not name.startswith("_")}
    by_modules = {"before_forward", "forward_ended", "after_forward", "before_backward", "complete_backward"}
    about_others = {"check_not_gathered", "check_awake", "is_over", "gather_ahead", "drop_ahead"}
    assert {event for event, _ in CYCLE} >= methods - by_modules - about_others
    assert methods >= by_modules | about_others
    assert {known for _, known in KNOWN} == {known.name for known in Known}
    assert {text for (row, _), text in CLOSED.items() if row == "held"} == {"UNSHARDED"}
    assert set(CLOSED.values()) <= {state.name for state in UnitState}


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in KNOWN.items()])
def test_what_the_ranks_have_agreed_on(monkeypatch: pytest.MonkeyPatch, event: str, before: str, after: str):
    """The ranks talk in the cells in which an order is wanted, and in no other; then cycles go in that order."""
    bench = Bench(monkeypatch)
    orders = bench.schedule.orders
    assert orders.known is Known.BOTH, "the bench has been through a step"
    orders.record()
    if before != "NOTHING":
        with torch.set_grad_enabled(before == "BOTH"):
            bench.whole_forward()
    assert orders.known is Known[before]
    agreed = Mock(wraps=orders.agree)
    monkeypatch.setattr(orders, "agree", agreed)
    if event == "record":
        orders.record()
    else:
        trains = event == "agree: trains"
        bench.calls.reverse()
        with torch.set_grad_enabled(trains):
            bench.whole_forward()
        assert agreed.call_count == (after != "--")
        called = FORWARD if after == "--" else [ROOT, *bench.calls]
        assert orders.forward == [bench.units[number] for number in called]
    assert orders.known is (Known[before] if after == "--" else Known[after])


@pytest.mark.parametrize(
    ("forwards", "counted"),
    [
        (["root"], True),
        (["root", "root"], True),
        (["part"], True),
        (["part", "part"], False),
        (["root", "part"], False),
        (["part", "root"], False),
        (["a unit calls another"], False),
        (["a unit calls another", "root"], False),
    ],
)
def test_when_the_last_backward_is_known(monkeypatch: pytest.MonkeyPatch, forwards: list[str], counted: bool):
    """A unit's gradients are complete before backward ends just where its cycles can be counted."""
    bench = Bench(monkeypatch)
    due, known = bench.schedule.due, bench.schedule.orders.known
    for forward in forwards:
        if forward == "part":
            bench.call(A)
        else:
            bench.forward_to(0)
        if forward == "a unit calls another":
            for number in (A, B):
                bench.schedule.before_forward(bench.units[number])
        bench.schedule.reshard_all()
    assert due.count == len(forwards)
    due.count = 1
    assert due.is_last(known) is counted
    due.reset()
    due.count = 1
    assert due.is_last(known)


@pytest.mark.parametrize(
    ("event", "cycle", "cell"),
    [(*cell, text) for cell, text in CYCLE.items()],
)
def test_a_cell_of_the_cycle(monkeypatch: pytest.MonkeyPatch, event: str, cycle: str, cell: str):
    """At every place of the cycle, about every unit: the cycle afterwards, and what was gathered on the way."""
    if cell == "--":
        return  # without a cycle no unit is open, or behind
    order = {"none": [], "FORWARD": FORWARD, "BACKWARD": BACKWARD}
    ends, after = "ends" in cell, "none" if cell == "ends" else cell.rpartition(", ")[2]
    for place in range(max(1, len(order[cycle]))):
        for number, again in itertools.product(about(event, cycle, place), (False, True)):
            if again and not event.startswith("backward: "):
                continue
            bench = Bench(monkeypatch)
            bench.bring(cycle, place)
            bench.gathers.clear()
            happens(bench, event, number, again=again)
            assert bench.cycle == after
            gathers = order[cycle][place + 1 :] if ends else []
            if event == "complete_all_backwards" and cycle == "FORWARD" and ends:
                gathers = gathers + BACKWARD  # the cycle that has ended trains: its backward is due
            if number is not None:  # on the way to it, in the cycle that goes on, or in the one that has begun
                path = order[after]
                way = (
                    path[0 if ends or after != cycle else place + 1 : path.index(number) + 1] if number in path else []
                )
                gathers = gathers + (way if number in path else [number])
                assert bench.units[number].state is UnitState.UNSHARDED
            assert bench.gathers == gathers


def test_a_backward_that_goes_on_is_not_ended_as_one_that_raised(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(monkeypatch)
    bench.bring("BACKWARD", 1)
    bench.gathers.clear()
    bench.schedule.complete_raised()
    assert bench.cycle == "BACKWARD" and bench.gathers == []


@pytest.mark.parametrize("due", [0, 1, 2])
@pytest.mark.parametrize("cycle", ["none", "BACKWARD"])
def test_all_that_is_due_is_gone_through(monkeypatch: pytest.MonkeyPatch, cycle: str, due: int):
    bench = Bench(monkeypatch)
    bench.bring(cycle, 1, due=due)
    bench.gathers.clear()
    bench.schedule.complete_all_backwards()
    assert bench.cycle == "none" and bench.due == 0
    assert bench.gathers == (BACKWARD[2:] if cycle == "BACKWARD" else []) + BACKWARD * due


@pytest.mark.parametrize("due", [0, 1, 2])
@pytest.mark.parametrize(("event", "becomes"), [(event, text) for (event, _), text in DUE.items()])
def test_what_is_due(monkeypatch: pytest.MonkeyPatch, event: str, becomes: str, due: int):
    bench = Bench(monkeypatch)
    if event.startswith("FORWARD ends"):
        with torch.set_grad_enabled("trains" in event):
            bench.bring("none", 0)
            for _ in range(due):
                with torch.enable_grad():
                    bench.whole_forward()
            bench.forward_to(1)
            bench.schedule.reshard_all()
    else:
        bench.bring("none", 0, due=due)
        if event == "BACKWARD ends":
            bench.backward_to(1)
            bench.end_backward()
        else:
            operator.attrgetter(event)(bench.schedule)()
    assert bench.due == {"one more": due + 1, "the same": due, "one less, or 0": max(0, due - 1), "0": 0}[becomes]


@pytest.mark.parametrize("keeps", ["nothing", "all", "1/k"])
@pytest.mark.parametrize("event", dict.fromkeys(event for event, _ in CLOSED))
def test_what_becomes_of_a_unit_that_is_left_behind(monkeypatch: pytest.MonkeyPatch, event: str, keeps: str):
    kept = {"keep": [A] if keeps == "all" else [], "on_node": [A] if keeps == "1/k" else []}
    again = event == "BACKWARD, comes again"
    bench = Bench(monkeypatch, twice=A if again else None, **kept)  # type: ignore[arg-type]
    unit = bench.units[A]
    if event.startswith("FORWARD"):
        with torch.set_grad_enabled(event == "FORWARD, trains"):
            bench.bring("FORWARD", 2)
    elif event == "held":
        bench.schedule.before_forward(bench.units[ROOT])
        bench.schedule.before_forward(unit)  # its forward is under way
        bench.schedule.before_forward(bench.units[B])
        assert unit.state is UnitState[CLOSED[event, keeps]]
        bench = Bench(monkeypatch, **kept)  # type: ignore[arg-type]
        unit = bench.units[A]
        bench.whole_forward()
        for number in BACKWARD:
            bench.gradient(number, create_graph=True)
        bench.end_backward()
    else:
        bench.whole_forward()
        for number in [ROOT, A, C] if again else BACKWARD:
            bench.gradient(number)
        if not again:
            bench.end_backward()
    assert unit.state is UnitState[CLOSED[event, keeps]]


def test_the_last_unit_stays_for_backward(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(monkeypatch, twice=A)
    unit = bench.units[A]
    bench.bring("FORWARD", 4)
    assert unit.state is UnitState.SHARDED, "it is called again"
    bench.whole_forward()
    assert unit.state is UnitState.UNSHARDED
    bench.gathers.clear()
    bench.gradient(A)
    assert bench.gathers == [ROOT]
    bench.whole_forward()
    bench.forward_to(0)
    assert unit.state is UnitState.SHARDED, "shards may have been written since"
    with torch.no_grad():
        bench.whole_forward()
    assert unit.state is UnitState.SHARDED, "no backward can follow"
    bench.schedule.orders.record()
    bench.whole_forward()
    assert unit.state is UnitState.SHARDED, "the order was not known"
    bench = Bench(monkeypatch)
    bench.whole_forward()
    assert bench.units[C].state is UnitState.SHARDED, "FROZEN comes after it"


def test_what_is_kept_in_evaluation_too(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(monkeypatch, keep=[A], keep_evaluating=True)
    with torch.no_grad():
        bench.bring("FORWARD", 2)
    assert bench.units[A].state is UnitState.UNSHARDED
