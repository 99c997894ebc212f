"""When a bucket may leave: counts, what was observed, what the ranks agree on; and units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from zero_optim.grads.readiness import ByCounts, ByUnits, Learned, Observation


@dataclass(frozen=True)
class FakeSlot:
    param: int


@dataclass(frozen=True)
class FakeLayout:
    slots: tuple[FakeSlot, ...]


@dataclass(frozen=True, eq=False)
class FakeBucket:
    layout: FakeLayout
    flat: str = ""


def _buckets(*params: tuple[int, ...]) -> Any:
    return [FakeBucket(FakeLayout(tuple(map(FakeSlot, of))), f"flat {number}") for number, of in enumerate(params)]


def _ready(readiness: ByCounts, *gradients: tuple[int, int], changes: bool = False) -> list[bool]:
    return [readiness.gradient_ready(index, number, changes_later=changes) for index, number in gradients]


def _learned(counts: dict[int, int] | None = None) -> ByCounts:
    readiness = ByCounts(observes=True)
    readiness.use(_buckets((0, 1), (2,)))
    readiness.agree([Observation((0, 1, 2), counts or {}, False)], [0, 1, 2])
    readiness.use(_buckets((0, 1), (2,)))
    assert readiness.learned is Learned.ALL
    return readiness


def test_a_bucket_may_leave_when_its_gradients_have_come():
    readiness = _learned()
    assert _ready(readiness, (0, 0), (2, 1)) == [False, True]
    assert [readiness.may_leave(number) for number in (0, 1)] == [False, True]
    assert _ready(readiness, (1, 0)) == [True]
    assert readiness.may_leave(0)
    readiness.begin()
    assert not readiness.may_leave(0) and not readiness.may_leave(1)


def test_while_observing_nothing_leaves():
    readiness = ByCounts(observes=True)
    readiness.use(_buckets((0,)))
    assert _ready(readiness, (0, 0)) == [True]
    assert not readiness.may_leave(0)


def test_what_comes_more_than_once_or_may_change_waits_for_the_end():
    twice = _learned({0: 2})
    _ready(twice, (0, 0), (1, 0), (0, 0), (2, 1))
    assert not twice.may_leave(0) and twice.may_leave(1)
    changing = _learned()
    _ready(changing, (0, 0), (1, 0), changes=True)
    assert not changing.may_leave(0)
    changing.backward_ended()
    changing.begin()
    _ready(changing, (0, 0), (1, 0))
    assert changing.may_leave(0), "the next backward begins anew"


@pytest.mark.parametrize("cut_short", [False, True])
def test_ranks_agree_on_rank_0s_order_and_the_largest_counts(cut_short: bool):
    readiness = ByCounts(observes=True)
    readiness.use(_buckets((0,), (1,), (2,)))
    reports = [Observation((2, 0, 2), {2: 2, 0: 1}, False), Observation((1,), {1: 3}, cut_short)]
    order = readiness.agree(reports, [0, 1, 2])
    assert order == (None if cut_short else [0, 2, 1]), "2 became ready last after 0; 1 is unknown to rank 0"
    assert readiness.learned is (Learned.NOTHING if cut_short else Learned.ALL)
    readiness.use(_buckets((0,), (1,), (2,)))
    _ready(readiness, (0, 0), (1, 1), (1, 1), (1, 1))
    assert readiness.may_leave(0) is not cut_short
    assert not readiness.may_leave(1), "it comes several times"


def test_a_step_before_any_backward_teaches_nothing():
    readiness = ByCounts(observes=True)
    readiness.use(_buckets((0,)))
    assert readiness.agree([Observation((), {}, False)] * 2, [0]) is None
    assert readiness.learned is Learned.NOTHING


@pytest.mark.parametrize(("order", "after"), [(True, Learned.NOTHING), (False, Learned.ORDER)])
def test_forgetting(order: bool, after: Learned):
    readiness = _learned()
    readiness.forget(order=order)
    assert readiness.learned is after
    assert readiness.agree([Observation((2, 1, 0), {}, False)], [0, 1, 2]) == ([2, 1, 0] if order else None)
    alone = ByCounts(observes=False)
    alone.forget(order=order)
    assert alone.learned is Learned.ALL


def test_an_observation_says_what_came_and_whether_it_was_cut_short():
    readiness = ByCounts(observes=True)
    readiness.use(_buckets((0, 1), (2,)))
    _ready(readiness, (1, 0), (1, 0), (2, 1))
    readiness.backward_ended()
    readiness.begin()
    assert readiness.observation() == Observation((1, 1, 2), {1: 2, 2: 1}, False)
    _ready(readiness, (0, 0))
    readiness.begin()  # without an end
    assert readiness.observation().cut_short
    readiness.drop_observation()
    assert readiness.observation() == Observation((), {}, False)


def test_by_units_a_bucket_leaves_with_its_unit():
    class Schedule:
        over: set[str] = set()

        def is_over(self, flat: Any) -> bool:
            return flat in self.over

    readiness = ByUnits(Schedule())
    readiness.use(_buckets((0,), (1,)))
    assert not readiness.gradient_ready(0, 0, changes_later=False)
    assert not readiness.may_leave(0)
    Schedule.over = {"flat 1"}
    assert [readiness.may_leave(number) for number in (0, 1)] == [False, True]
