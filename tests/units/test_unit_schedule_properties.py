"""Whatever a rank's forward and backward use of a model, every rank gathers the same units in the same order."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zero_optim import recovery
from zero_optim.units import schedule
from zero_optim.units.schedule import UnitSchedule
from zero_optim.units.unit import UnitState

RANKS = 3


@dataclass
class Log:
    """What a rank has gathered; how many are whole, and were at once, at most; both before each call but of experts."""

    gathers: list[int] = field(default_factory=list)
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    whole: int = 0
    most: int = 0


@dataclass(eq=False)
class FakeUnit:
    """A unit as far as the schedule knows one."""

    number: int
    keep: bool
    enclosing: set[FakeUnit]
    log: Log
    node: None = None
    flats: list[object] = field(default_factory=list)
    state: UnitState = UnitState.SHARDED
    of_experts: bool = False

    def unshard(self) -> None:
        if self.state is UnitState.SHARDED:
            self.log.gathers.append(self.number)
            self.log.whole += 1
            self.log.most = max(self.log.most, self.log.whole)
            self.state = UnitState.UNSHARDING

    def wait(self) -> None:
        self.state = UnitState.UNSHARDED

    def moved(self) -> list[str]:
        return []

    def watch_parts(self) -> None:
        pass

    def unwatch_parts(self) -> None:
        pass

    def reshard(self, *, to_node: bool = False) -> None:
        self.log.whole -= self.state is not UnitState.SHARDED
        self.state = UnitState.SHARDED


@dataclass
class FakeComm:
    """Ranks are threads: each gives its report and waits for the others'."""

    rank: int
    reports: list[object]  # shared
    meeting: threading.Barrier

    @property
    def world(self) -> FakeComm:
        return self

    def gather_objects(self, report: object, where: str) -> list[object]:
        self.meeting.wait(timeout=20)
        self.reports[self.rank] = report
        self.meeting.wait(timeout=20)
        return list(self.reports)


def comms(ranks: int) -> list[FakeComm]:
    reports: list[object] = [None] * ranks
    meeting = threading.Barrier(ranks)
    return [FakeComm(rank, reports, meeting) for rank in range(ranks)]


class FakeWatch:
    running = True

    def enter(self) -> None:
        pass


class FakeReducer:
    """Its reductions leave as units are over, and are under way for as long as chance has it."""

    def __init__(self, chance: random.Random, of: UnitSchedule) -> None:
        self.chance, self.of = chance, of

    def arrives(self) -> bool:
        return self.chance.random() < 0.5

    def gradient_ready(self) -> None:
        if self.arrives():
            self.of.prefetch.reductions_arrived(self)

    def backward_moves(self) -> None:
        pass

    def units_over(self) -> None:
        self.of.prefetch.reduction_begins(self)
        self.gradient_ready()

    def order_known(self) -> None:
        pass


class Rank:
    """One rank's schedule, driven by hand as modules and autograd would.

    Args:
        chance: of its reductions; None: there are none.
        twice: what the root calls a second time, after the unit ``again_after`` or else after all others.
        called: all numbers but the root's, in the order in which units are called; none: as they are numbered.
        frozen: what gives nothing that requires a gradient; a checkpoint calls it again all the same.
    """

    def __init__(
        self,
        outer_of: list[int | None],
        keep: bool,
        prefetch: int,
        comm: FakeComm,
        chance: random.Random | None = None,
        twice: frozenset[int] = frozenset(),
        frozen: frozenset[int] = frozenset(),
        called: Sequence[int] = (),
        again_after: int = 0,
        experts: frozenset[int] = frozenset(),
    ) -> None:
        self.twice, self.frozen, self.called, self.again_after = twice, frozen, list(called), again_after
        self.log = Log()
        self.units = [FakeUnit(0, True, set(), self.log)]
        for number, outer in enumerate(outer_of, 1):
            around = self.units[0 if outer is None else outer]
            enclosing = {around, *around.enclosing}
            self.units.append(FakeUnit(number, keep, enclosing, self.log, of_experts=number in experts))
        self.schedule = UnitSchedule(self.units, comm, prefetch, keep_evaluating=keep)  # type: ignore[arg-type]
        self.schedule.watch = FakeWatch()  # type: ignore[assignment]
        recovery._owing.clear()  # ranks are threads: no rank's schedule is to know another's
        self.reducers = [] if chance is None else [FakeReducer(chance, self.schedule)]
        self.schedule.listeners += self.reducers
        self.used: set[int] = set()

    def children(self, unit: FakeUnit) -> Iterator[FakeUnit]:
        """Units called within ``unit``'s forward, directly."""
        within = [other for other in self.units[1:] if unit in other.enclosing]
        direct = [other for other in within if len(other.enclosing) == len(unit.enclosing) + 1]
        if self.called:
            direct.sort(key=lambda other: self.called.index(other.number))
        if unit is self.units[0]:
            after = [other.number for other in direct].index(self.again_after) + 1 if self.again_after else len(direct)
            direct[after:after] = [other for other in direct if other.number in self.twice]
        yield from direct

    def note(self, unit: FakeUnit) -> None:
        self.log.calls += [] if unit.of_experts else [(unit.number, len(self.log.gathers), self.log.whole)]

    def forward(self, unit: FakeUnit, used: set[int]) -> None:
        self.note(unit)
        self.schedule.before_forward(unit)  # type: ignore[arg-type]
        assert unit.state is UnitState.UNSHARDED
        self.check_experts()
        for child in self.children(unit):
            if child.number in used:
                self.forward(child, used)
                assert unit.state is UnitState.UNSHARDED, "an outer unit is there as long as its forward"
        self.schedule.forward_ended(unit)  # type: ignore[arg-type]
        needs = torch.is_grad_enabled() and unit.number not in self.frozen
        self.schedule.after_forward(unit, requires_grad=needs)  # type: ignore[arg-type]

    def backward(self, unit: FakeUnit, used: set[int], checkpointed: int) -> None:
        """Back through what the forward used; ``checkpointed`` units in a row are computed again together."""
        self.note(unit)
        if unit.number not in self.frozen:
            self.schedule.before_backward(unit)  # type: ignore[arg-type]
            assert unit.state is UnitState.UNSHARDED
            self.check_experts()
        for reducer in self.reducers:  # found as a gradient becomes ready
            reducer.gradient_ready()
        children = [child for child in self.children(unit) if child.number in used]
        while children:
            segment, children = children[-checkpointed:], children[:-checkpointed]
            if checkpointed > 1:
                for child in segment:
                    self.again(child, used)
            for child in reversed(segment):
                self.backward(child, used, checkpointed)
                if unit.number not in self.frozen:
                    assert unit.state is UnitState.UNSHARDED, "an outer unit is there as long as its backward"

    def check_experts(self) -> None:
        """This rank may call none of the experts that come next, and others wait for it in their gathers."""
        following = itertools.takewhile(lambda unit: unit.of_experts, self.schedule.cycle.ahead)
        assert self.twice or all(unit.state is not UnitState.SHARDED for unit in following)

    def again(self, unit: FakeUnit, used: set[int]) -> None:
        self.schedule.before_forward(unit)  # type: ignore[arg-type]
        assert unit.state is UnitState.UNSHARDED
        for child in self.children(unit):
            if child.number in used:
                self.again(child, used)


@dataclass(frozen=True)
class Step:
    """``uses``: for each rank, the units that its forward calls; ``reaches``: those of them that backward comes to."""

    uses: tuple[frozenset[int], ...]
    trains: bool
    backward: bool
    checkpointed: int


UNITS = 6
subsets = st.frozensets(st.integers(1, UNITS))
steps = st.builds(
    Step,
    uses=st.tuples(*[st.one_of(st.just(frozenset(range(1, UNITS + 1))), subsets)] * RANKS),
    trains=st.booleans(),
    backward=st.booleans(),
    checkpointed=st.integers(1, 4),
)


def _tree(depths: tuple[int, ...]) -> list[int | None]:
    """The unit that each is within, None where it is the root alone, as ``model.modules()`` may have them."""
    around: list[int] = []
    outer_of: list[int | None] = []
    for number, depth in enumerate(depths, 1):
        del around[depth:]
        outer_of.append(around[-1] if around else None)
        around.append(number)
    return outer_of


trees = st.one_of(st.just(_tree((0,) * UNITS)), st.tuples(*[st.integers(0, 2)] * UNITS).map(_tree))


def _example(**given: Any) -> Any:
    """An example of ``test_all_ranks_gather_alike``: what it does not name is the simplest."""
    simplest = {"keep": False, "prefetch": 0, "seed": 0, "twice": frozenset(), "frozen": frozenset(), "called": ()}
    return example(**{**simplest, "again_after": 0, "alike": False, "experts": frozenset(), **given})


def play(rank: Rank, number: int, step: Step, flag: threading.local) -> None:
    flag.backward = False
    used = set(step.uses[number])
    with torch.set_grad_enabled(step.trains):
        rank.forward(rank.units[0], used)
    if step.trains and step.backward:
        flag.backward = True
        with torch.no_grad():
            rank.backward(rank.units[0], used, step.checkpointed)
            rank.schedule.complete_backward()
        through = [unit for unit in rank.units if unit.number not in rank.frozen]  # the others may be kept until step
        assert all(unit.state is UnitState.SHARDED for unit in through), "after backward all are sharded"
        flag.backward = False
    if step.trains:
        rank.schedule.reshard_all()
        rank.schedule.due.reset()


@settings(max_examples=400, deadline=None)
@given(
    outer_of=trees,
    keep=st.booleans(),
    prefetch=st.integers(0, UNITS),
    program=st.lists(steps, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    twice=subsets,
    frozen=subsets,
    called=st.one_of(st.just(()), st.permutations(range(1, UNITS + 1))),
    again_after=st.integers(0, UNITS),
    alike=st.booleans(),
    experts=subsets,
)
@_example(
    # Unit 3, within 2, is not used in the first forward that trains; and 1, which comes before it, is called twice.
    outer_of=_tree((0, 0, 1, 0, 0, 0)),
    program=[
        Step((frozenset({1, 2}),) * RANKS, trains=True, backward=False, checkpointed=1),
        Step((frozenset(range(1, UNITS + 1)),) * RANKS, trains=True, backward=True, checkpointed=1),
    ],
    twice=frozenset({1}),
)
@_example(
    # Rank 0 uses 4, which is called before 2; rank 1 uses 3, within 2. Nothing but 3 may come between 2 and 3.
    outer_of=_tree((0, 0, 1, 0, 0, 0)),
    program=[
        Step((frozenset({2, 4}), frozenset({2, 3}), frozenset({2})), trains=True, backward=True, checkpointed=1),
        Step((frozenset({2, 4}), frozenset({2, 3}), frozenset({2})), trains=True, backward=True, checkpointed=1),
    ],
    called=(4, 1, 2, 3, 5, 6),
)
@_example(
    # Within 1 and within 4, the later one is called first; and 1 is left out of the first forward.
    outer_of=_tree((0, 1, 1, 0, 1, 1)),
    program=[Step((frozenset({4, 5, 6}),) * RANKS, trains=True, backward=True, checkpointed=1)],
    called=(1, 3, 2, 4, 6, 5),
    alike=True,
)
@_example(
    # An evaluation calls 1, 3, 1 and not 2, which is within 1. Then 1, 3; then 2 within 1.
    outer_of=_tree((0, 1, 0, 0, 0, 0)),
    program=[
        Step((frozenset({1, 3}),) * RANKS, trains=False, backward=False, checkpointed=1),
        Step((frozenset({1, 3}),) * RANKS, trains=True, backward=True, checkpointed=1),
        Step((frozenset({1, 2}),) * RANKS, trains=True, backward=True, checkpointed=1),
    ],
    twice=frozenset({1}),
    alike=True,
)
@_example(
    # Backward comes to 6, 5, 3, 4, 3, 2. A rank that sends for four at once must not send for 2 before the second 3.
    outer_of=_tree((0,) * UNITS),
    prefetch=4,
    program=[Step((frozenset(range(1, UNITS + 1)),) * RANKS, trains=True, backward=True, checkpointed=1)] * 2,
    twice=frozenset({3}),
    again_after=4,
)
@_example(
    # Backward comes to 5, 6, 5, 4. The first 5 has stayed; the second has to be gathered, before 4 is sent for.
    outer_of=_tree((0,) * UNITS),
    prefetch=4,
    program=[Step((frozenset(range(1, UNITS + 1)),) * RANKS, trains=True, backward=True, checkpointed=1)] * 4,
    twice=frozenset({5}),
)
def test_all_ranks_gather_alike(
    outer_of: list[int | None],
    keep: bool,
    prefetch: int,
    program: list[Step],
    seed: int,
    twice: frozenset[int],
    frozen: frozenset[int],
    called: Sequence[int],
    again_after: int,
    alike: bool,
    experts: frozenset[int],
) -> None:
    """Whenever their reductions arrive. Where units are called twice, or come into a backward and are not in its order
    (frozen, in a checkpoint), every rank has to use the same."""
    if again_after and outer_of[again_after - 1] is not None:
        again_after = 0  # it is not the root that calls it
    if twice or frozen or alike:
        program = [replace(step, uses=step.uses[:1] * RANKS) for step in program]
    elif called:  # in the first forward no rank skips one
        program = [Step((frozenset(range(1, UNITS + 1)),) * RANKS, False, False, 1), *program]
    flag = threading.local()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(RANKS) as threads:
        patch.setattr(schedule, "in_backward", lambda: flag.backward)
        chances = [random.Random(f"{seed} {number}") for number in range(RANKS)]
        ranks = [
            Rank(outer_of, keep, prefetch, *of, twice, frozen, called, again_after, experts)
            for of in zip(comms(RANKS), chances, strict=True)
        ]
        for number, step in enumerate(program):
            for played in [threads.submit(play, rank, place, step, flag) for place, rank in enumerate(ranks)]:
                played.result()
            first, *others = (rank.log.gathers for rank in ranks)
            assert all(other == first for other in others), f"step {number}"
            codes = {rank.schedule.cycle.code for rank in ranks}
            assert len(codes) == 1


@settings(max_examples=40, deadline=None)
@given(outer_of=trees, prefetch=st.integers(0, 3), checkpointed=st.integers(1, 4))
def test_a_usual_step_gathers_each_unit_but_the_last_twice_and_few_at_once(
    outer_of: list[int | None], prefetch: int, checkpointed: int
) -> None:
    everything = frozenset(range(1, UNITS + 1))
    flag = threading.local()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "in_backward", lambda: flag.backward)
        rank = Rank(outer_of, False, prefetch, *comms(1))
        for step in range(2):
            rank.log.gathers.clear()
            play(rank, 0, Step((everything,), True, True, checkpointed), flag)
            last = rank.schedule.orders.backward[1].number if step else 0  # it stays, once the order is known
            assert sorted(rank.log.gathers) == sorted([0, *range(1, UNITS + 1), *({*range(1, UNITS + 1)} - {last})])
        deepest = max(len(unit.enclosing) for unit in rank.units)
        in_use = 1 if checkpointed == 1 else checkpointed + 1  # and that before them, until backward is there
        if set(outer_of) == {None} or checkpointed == 1:
            assert rank.log.most <= deepest + in_use + prefetch, "those in use, those around them, and those ahead"


@pytest.mark.parametrize(("busy", "most"), [(True, 2), (False, 4)])
def test_units_are_sent_for_when_no_reduction_is_under_way(busy: bool, most: int) -> None:
    flag = threading.local()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "in_backward", lambda: flag.backward)
        patch.setattr(FakeReducer, "arrives", lambda reducer: not busy)
        rank = Rank([None] * UNITS, False, 2, *comms(1), random.Random(0))
        rank.reducers[0].units_over()
        for _ in range(2):
            rank.log.gathers.clear()
            play(rank, 0, Step((frozenset(range(1, UNITS + 1)),), True, True, 1), flag)
        assert rank.log.gathers == [0, *range(1, UNITS + 1), *range(UNITS - 1, 0, -1)]
        assert rank.log.most == most, "the root, one, and those ahead"


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_rank_without_tokens_launches_alike_between_the_other_units(prefetch: int) -> None:
    """Two blocks, each with a unit and two of experts: rank 1 calls no experts after the first step."""
    flag, logs = threading.local(), []
    everything = frozenset(range(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "in_backward", lambda: flag.backward)
        for used in (everything, everything - {3, 4, 7, 8}):
            rank = Rank(_tree((0, 1, 1, 1) * 2), False, prefetch, *comms(1), experts=frozenset({3, 4, 7, 8}))
            for uses in (everything, used, used):
                play(rank, 0, Step((uses,), True, True, 1), flag)
            logs.append(rank.log)
    assert logs[0].gathers == logs[1].gathers and logs[0].calls == logs[1].calls
