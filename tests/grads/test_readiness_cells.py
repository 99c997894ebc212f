"""Every cell of the tables below: when a bucket can be launched, what is learned, what was observed.

At stage 3 the answer is *by units*: it depends on the bucket's unit alone. At stages 0 to 2 it is *by counts*: it
depends on which gradients of the bucket have come, and on what the ranks have learned.

===================  ==========  ==========  ==========  ==========  ==========
may_launch           NOTHING     ORDER       ALL         unit open   unit over
===================  ==========  ==========  ==========  ==========  ==========
MISSING              no          no          no          no          yes
FULL                 no          no          yes         no          yes
FULL, repeats        no          no          no          no          yes
FULL, changes        no          no          no          no          yes
===================  ==========  ==========  ==========  ==========  ==========

- *MISSING*: not every gradient has come as often as it is expected to. *FULL*: every gradient has.
- *repeats*: one of the gradients is expected more than once.
- *changes*: a hook of the user's runs after ours, and may change one of the gradients.
- *unit over*: backward is through with the bucket's unit, or the backward before was.

By counts, what has come of a bucket:

===================  ==========  ==========
a gradient comes     MISSING     FULL
===================  ==========  ==========
more are missing     MISSING     --
the last missing     FULL        --
once too often       MISSING     FULL
``begin``            MISSING     MISSING
``use``              MISSING     MISSING
===================  ==========  ==========

The reducer calls ``begin`` right after ``backward_ended``, too: before that no gradient comes.

By counts, what the ranks have learned. Reports are *whole* where no backward of any rank was cut short by an exception,
and at least one rank has seen a gradient:

===================  ==========  ==========  ==========
learned              NOTHING     ORDER       ALL
===================  ==========  ==========  ==========
agree: whole         ALL         ALL         ALL
agree: cut short     NOTHING     ORDER       ALL
agree: empty         NOTHING     ORDER       ALL
forget: order        NOTHING     NOTHING     NOTHING
forget: counts       NOTHING     ORDER       ORDER
drop_observation     NOTHING     ORDER       ALL
gradient_ready       NOTHING     ORDER       ALL
backward_ended       NOTHING     ORDER       ALL
begin                NOTHING     ORDER       ALL
use                  NOTHING     ORDER       ALL
===================  ==========  ==========  ==========

``agree`` gives a new order of parameters in NOTHING alone, and only where the reports are whole. Where there is nothing
to be learned, as on one rank, the state is ALL from the start, and ``forget`` leaves it so.

By counts, what this rank has seen since the ranks last agreed. In ALL it notes no gradients:

===================  ==========  ==========  ==========  ==========
observation          EMPTY       RUNNING     WHOLE       CUT SHORT
===================  ==========  ==========  ==========  ==========
gradient_ready       RUNNING     RUNNING     RUNNING     CUT SHORT
backward_ended       EMPTY       WHOLE       WHOLE       CUT SHORT
begin                EMPTY       CUT SHORT   WHOLE       CUT SHORT
use                  EMPTY       CUT SHORT   WHOLE       CUT SHORT
agree: whole         EMPTY       --          EMPTY       --
agree: cut short     EMPTY       --          EMPTY       EMPTY
agree: empty         EMPTY       --          --          --
forget: order        EMPTY       --          EMPTY       EMPTY
forget: counts       EMPTY       --          EMPTY       EMPTY
drop_observation     EMPTY       --          EMPTY       EMPTY
===================  ==========  ==========  ==========  ==========

- *RUNNING*: gradients have come in a backward that has not ended. *WHOLE*: every backward has ended.
- *CUT SHORT*: a backward has raised. It never ends; the next ``begin`` finds it.
- *--*: cannot be. The reducer calls ``begin`` before these calls, and the reports include this rank's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tables import table
from zero_optim.grads import readiness
from zero_optim.grads.readiness import ByCounts, ByUnits, Learned, Observation

MAY_LEAVE = table(__doc__, "may_launch")
COMES = table(__doc__, "a gradient comes")
LEARNED = table(__doc__, "learned")
OBSERVATION = table(__doc__, "observation")


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


class Changing:
    """The parameters that a hook of the user's may change after ours."""

    def __init__(self) -> None:
        self.params: set[int] = set()

    def __call__(self, indices: Sequence[int]) -> bool:
        return not self.params.isdisjoint(indices)


def _new(*, observes: bool = True, changing: Changing | None = None) -> ByCounts:
    return ByCounts(observes, changing or Changing())


def _ready(readiness: ByCounts, *gradients: tuple[int, int]) -> list[bool]:
    return [readiness.gradient_ready(index, number) for index, number in gradients]


# -- the tables: bucket 0 has parameters 0, 1 and 2, bucket 1 has parameter 3 ------------------------------------------

ORDER = [0, 1, 2, 3]
REPORTS = {
    "whole": [Observation((0, 1, 2, 3), {}, False), Observation((), {}, False)],
    "cut short": [Observation((0,), {}, False), Observation((0, 1), {}, True)],
    "empty": [Observation((), {}, False)] * 2,
}


def _by_counts(learned: Learned, repeated: int | None = None, changing: Changing | None = None) -> ByCounts:
    """One that has learned so much. ``repeated``: a parameter that comes twice."""
    readiness = _new(changing=changing)
    readiness.use(_buckets((0, 1, 2), (3,)))
    counts = {} if repeated is None else {repeated: 2}
    if learned is not Learned.NOTHING:
        readiness.agree(REPORTS["whole"], ORDER)
    if learned is Learned.ORDER:
        readiness.forget(order=False)
    cut_short = learned is not Learned.ALL  # such a report brings counts, and changes nothing else
    readiness.agree([Observation((0,), counts, cut_short)], ORDER)
    readiness.use(_buckets((0, 1, 2), (3,)))
    assert readiness.learned is learned
    return readiness


def _by_unit(over: bool) -> ByUnits:
    class Schedule:
        def is_over(self, flat: Any) -> bool:
            return over and flat == "flat 0"

    schedule: Any = Schedule()
    readiness = ByUnits(schedule)
    readiness.use(_buckets((0, 1, 2), (3,)))
    return readiness


def _come(readiness: ByCounts | ByUnits, bucket: str, missing: int = 1) -> None:
    """Let gradients of bucket 0 come until this is what has come of it. ``missing``: so many of three, unless FULL."""
    come = 3 if bucket.startswith("FULL") else 3 - missing
    for index in range(come):
        full = index == 2 and isinstance(readiness, ByCounts) and "repeats" not in bucket
        assert readiness.gradient_ready(index, 0) is full
    if "repeats" in bucket:
        assert readiness.gradient_ready(0, 0) is isinstance(readiness, ByCounts)


@pytest.mark.parametrize(("bucket", "column", "cell"), [(*cell, text) for cell, text in MAY_LEAVE.items()])
def test_whether_a_bucket_may_leave(bucket: str, column: str, cell: str):
    for missing in (1, 2):
        changing = Changing()
        if column.startswith("unit"):
            readiness: ByCounts | ByUnits = _by_unit(over=column == "unit over")
        else:
            readiness = _by_counts(Learned[column], 0 if "repeats" in bucket else None, changing)
        changing.params.update({1, 3} if "changes" in bucket else {3})
        _come(readiness, bucket, missing)
        assert readiness.may_launch(0) is (cell == "yes")
        assert not readiness.may_launch(1), "nothing of it has come"


def test_the_tables_have_every_state_and_every_event():
    learned = {state.name for state in Learned}
    assert {column for _, column in MAY_LEAVE} == {*learned, "unit open", "unit over"}
    assert {column for _, column in LEARNED} == learned
    methods = {name for name, value in vars(ByCounts).items() if callable(value) and not name.startswith("_")}
    events = methods - {"may_launch", "observation"}  # which change nothing
    assert {event.partition(":")[0] for event, _ in LEARNED} == events
    assert {event.partition(":")[0] for event, _ in OBSERVATION} == events
    assert {f"agree: {reports}" for reports in REPORTS} == {event for event, _ in LEARNED if event.startswith("agree")}
    for_the_reducer = {name for name, value in vars(ByUnits).items() if callable(value) and not name.startswith("_")}
    assert for_the_reducer == {"use", "begin", "gradient_ready", "may_launch", "backward_ended"} < methods


def _what_has_come(readiness: ByCounts) -> str:
    """Of bucket 0, in ALL: told apart by what still lets it leave."""
    if readiness.may_launch(0):
        return "FULL"
    return "MISSING"


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in COMES.items()])
def test_what_comes_of_a_bucket(event: str, before: str, after: str):
    if after == "--":
        return  # nothing is missing
    readiness = _by_counts(Learned.ALL)
    _come(readiness, before, 2 if event == "more are missing" else 1)
    assert _what_has_come(readiness) == before
    if event == "more are missing":
        assert not readiness.gradient_ready(1, 0)
    elif event == "the last missing":
        assert readiness.gradient_ready(2, 0), "the bucket is full by that"
    elif event == "once too often":
        assert not readiness.gradient_ready(0, 0)
    elif event == "``use``":
        readiness.use(_buckets((0, 1, 2), (3,)))
    else:
        getattr(readiness, event.strip("`"))()
    assert _what_has_come(readiness) == after


def _tell(readiness: ByCounts, event: str) -> list[int] | None:
    """What ``agree`` gives, if the event is that."""
    name, _, how = event.partition(": ")
    if name == "agree":
        own = readiness.observation()
        reports = REPORTS[how]
        return readiness.agree([own if own.order or own.cut_short else reports[0], *reports[1:]], [3, 2, 1, 0])
    if name == "forget":
        readiness.forget(order=how == "order")
    elif name == "use":
        readiness.use(_buckets((0, 1, 2), (3,)))
    elif name == "gradient_ready":
        readiness.gradient_ready(0, 0)
    else:
        getattr(readiness, name)()
    return None


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in LEARNED.items()])
def test_what_the_ranks_have_learned(event: str, before: str, after: str):
    readiness = _by_counts(Learned[before])
    order = _tell(readiness, event)
    assert readiness.learned is Learned[after]
    lays_out = before == "NOTHING" and event == "agree: whole"
    assert order == (ORDER if lays_out else None)


@pytest.mark.parametrize("event", [event for event, before in LEARNED if before == "ALL"])
def test_where_there_is_nothing_to_be_learned_all_is_known(event: str):
    readiness = _new(observes=False)
    readiness.use(_buckets((0, 1, 2), (3,)))
    _tell(readiness, event)
    assert readiness.learned is Learned.ALL


def _observation(state: str, learned: Learned) -> ByCounts:
    """One that has seen so much: of parameter 0, where it has seen something."""
    readiness = _by_counts(learned)
    if state != "EMPTY":
        readiness.gradient_ready(0, 0)
    if state == "WHOLE":
        readiness.backward_ended()
    if state in ("WHOLE", "CUT SHORT"):
        readiness.begin()
    return readiness


def _observation_state(readiness: ByCounts) -> str:
    """Read from what it reports, now and after one more ``begin``."""
    now, later = readiness.observation(), copy.deepcopy(readiness)
    later.begin()
    if now.cut_short:
        return "CUT SHORT"
    if later.observation().cut_short:
        return "RUNNING"
    return "WHOLE" if now.order else "EMPTY"


@pytest.mark.parametrize("learned", [Learned.NOTHING, Learned.ORDER])
@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in OBSERVATION.items()])
def test_what_this_rank_has_seen(event: str, before: str, after: str, learned: Learned):
    readiness = _observation(before, learned)
    assert _observation_state(readiness) == before
    if after == "--":
        return  # ruled out by the reducer
    seen = readiness.observation()
    _tell(readiness, event)
    assert _observation_state(readiness) == after
    now = readiness.observation()
    if after == "EMPTY":
        assert now == Observation((), {}, False)
    else:
        assert now.order == seen.order + ((0,) if event == "gradient_ready" else ())
        assert now.counts == ({0: 1} if after == "WHOLE" or before == "WHOLE" else {})


@pytest.mark.parametrize("event", ["gradient_ready", "backward_ended", "begin", "use", "drop_observation"])
def test_where_all_is_known_no_gradient_is_noted(event: str):
    for state in ("EMPTY", "RUNNING", "WHOLE", "CUT SHORT"):
        readiness = _observation(state, Learned.ALL)
        _tell(readiness, event)
        assert (readiness.observation().order, readiness.observation().counts) == ((), {})


# -- several events together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_short", [False, True])
def test_ranks_agree_on_rank_0s_order_and_the_largest_counts(cut_short: bool):
    readiness = _new()
    readiness.use(_buckets((0,), (1,), (2,)))
    reports = [Observation((2, 0, 2), {2: 2, 0: 1}, False), Observation((1,), {1: 3}, cut_short)]
    order = readiness.agree(reports, [0, 1, 2])
    assert order == (None if cut_short else [0, 2, 1]), "2 became ready last after 0; 1 is unknown to rank 0"
    assert readiness.learned is (Learned.NOTHING if cut_short else Learned.ALL)
    readiness.use(_buckets((0,), (1,), (2,)))
    _ready(readiness, (0, 0), (1, 1), (1, 1), (1, 1))
    assert readiness.may_launch(0) is not cut_short
    assert not readiness.may_launch(1), "it comes several times"


def test_an_observation_says_what_came_and_whether_it_was_cut_short():
    readiness = _new()
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


def test_reports_that_are_merged_have_the_last_place_of_each_gradient_and_rank_0s_order():
    """Of rank 1 remains that 3 came, how often 0 did, and that a backward was cut short."""
    reports = [Observation((2, 1, 2, 0), {0: 1, 1: 1, 2: 2}, False), Observation((3, 0, 0), {0: 2}, True)]
    vectors = [readiness._vector(own, 7, orders=rank == 0) for rank, own in enumerate(reports)]
    counts = {0: 2, 1: 1, 2: 2, 3: 1}
    wanted = [Observation((1, 2, 0), counts, True), Observation((0, 1, 2, 3), counts, True)]
    assert readiness._reports(torch.stack(vectors).amax(0), 7) == wanted
