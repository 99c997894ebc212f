"""Handles: waiting for several collectives as one, what runs on arrival, and the two legs of HSDP under gloo.

====================  ==========  ==========  =========
event                 WITHIN      ACROSS      ARRIVED
====================  ==========  ==========  =========
go_on, arrived        ACROSS      ACROSS      ARRIVED
go_on, not arrived    WITHIN      ACROSS      ARRIVED
wait                  ARRIVED     ARRIVED     ARRIVED
wait: leg 1 fails     WITHIN      --          --
wait: leg 2 fails     ACROSS      ACROSS      --
====================  ==========  ==========  =========
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from harness import run_ranks
from tables import table
from zero_optim.comm import deadlock, transport
from zero_optim.comm.collectives import Comm
from zero_optim.comm.deadlock import Deadlock, Watch
from zero_optim.comm.handle import Handle, SecondLegs, Traffic
from zero_optim.comm.transport import GLOO, Works
from zero_optim.errors import CollectiveError, RankMismatchError


class FakeWork:
    """A collective that has arrived, has failed or never arrives; a wait for one of the last kind takes no time."""

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    def get_future(self) -> FakeWork:
        return self

    def done(self) -> bool:
        return self.outcome != "never"

    def wait(self, *timeout: object) -> bool:
        assert timeout or self.outcome != "never", "this wait would never end"
        if self.outcome != "arrived":
            raise RuntimeError("Operation timed out!" if self.outcome == "never" else "Connection closed by peer")
        return True


class FakeRecord:
    """Of a deadlock: another rank has found one, or none has."""

    def __init__(self, found: Deadlock | None = None) -> None:
        self.found, self.ended = found, False

    def look(self, *_: object) -> None:
        raise AssertionError("it has failed: nothing is waited for")

    def end(self) -> Deadlock | None:
        self.ended = True
        return self.found


def _watched(monkeypatch: pytest.MonkeyPatch, found: Deadlock | None, *outcomes: str) -> tuple[Handle, FakeRecord]:
    record = FakeRecord(found)
    monkeypatch.setattr(deadlock, "_record_of", lambda comm: record)
    handle = Handle(Works([FakeWork(outcome) for outcome in outcomes]))
    handle.watch, handle.traffic = Watch(Comm(None)), Traffic("all_gather")
    return handle, record


def test_several_arrive_when_all_have(monkeypatch):
    assert _watched(monkeypatch, None, "arrived", "arrived")[0].arrives_within(0)
    assert not _watched(monkeypatch, None, "arrived", "never")[0].arrives_within(1)
    assert not _watched(monkeypatch, None, "never", "arrived")[0].arrives_within(1)


@pytest.mark.parametrize("outcomes", [("failed", "never"), ("arrived", "failed", "never"), ("never", "failed")])
def test_one_that_failed_ends_the_wait_for_all(monkeypatch, outcomes):
    handle, record = _watched(monkeypatch, None, *outcomes)
    assert not handle.arrives_within(0)  # nobody has asked the one that failed yet
    assert handle.arrives_within(1)
    with pytest.raises(CollectiveError, match="all_gather did not complete: Connection closed by peer"):
        handle.wait()
    assert record.ended and handle.watch.comm.out_of_step


class LetsGoLate:
    """The thread of a collective that has arrived: it holds its tensor until it has been given way to so often."""

    def __init__(self, tensor: torch.Tensor, ways: float) -> None:
        self.given, self._ways = 0, ways
        self._holds = torch.zeros_like(tensor)
        self._holds.grad = tensor  # a reference in C++

    def sleep(self, seconds: float) -> None:
        self.given += 1
        if self.given >= self._ways:
            self._holds.grad = None


@pytest.mark.parametrize("ways", [1, 3])
def test_what_was_sent_belongs_to_nobody_else_after_the_wait(monkeypatch, ways):
    view = torch.zeros(4).view(-1)
    thread = LetsGoLate(view, ways)
    monkeypatch.setattr(transport.time, "sleep", thread.sleep)
    works = Works([FakeWork("arrived")], [view])
    assert works.is_completed() and view._use_count() == 2
    works.wait()
    assert view._use_count() == 1 and thread.given == ways
    assert works.is_completed()


def test_a_thread_that_never_lets_go_does_not_hold_the_wait(monkeypatch):
    view = torch.zeros(4).view(-1)
    thread = LetsGoLate(view, float("inf"))
    monkeypatch.setattr(transport.time, "sleep", thread.sleep)
    monkeypatch.setattr(transport, "LETS_GO_WITHIN", 0.0)
    Works([FakeWork("arrived")], [view]).wait()
    assert view._use_count() == 2


def test_a_deadlock_that_another_rank_has_found_is_raised_before_its_closed_connection(monkeypatch):
    """That rank writes it, raises and leaves: the connection may close before this rank has looked again."""
    handle, record = _watched(monkeypatch, Deadlock("the ranks wait for each other"), "failed")
    with pytest.raises(RankMismatchError, match="the ranks wait for each other"):
        handle.wait()
    comm = handle.watch.comm
    assert record.ended and comm.out_of_step
    with pytest.raises(RankMismatchError, match="ranks are out of sync after an earlier error"):
        comm.log.check()


class Unasked(FakeWork):
    """A collective on a device: whether it is over depends on timing, so nothing may ask."""

    def is_completed(self) -> bool:
        raise AssertionError("asked whether it has arrived")


def test_where_the_stream_waits_nobody_asks():
    """The host would launch what follows sooner or later, and on every rank at another time."""
    handle = Handle(Unasked("arrived"))
    assert handle.arrives_within(0) and handle.arrives_within(1)
    handle.wait()
    assert handle.arrives_within(0)


def _asked_while_they_end(rank: int, world_size: int) -> int:
    asked = 0
    sys.setswitchinterval(1e-4)  # the two threads then meet: on one core within 1200 collectives, in 8 of 8 runs
    with torch.profiler.profile(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        for _ in range(1500):
            work = GLOO.all_reduce(torch.ones(1), None)._work
            while not work.is_completed():
                asked += 1
    sys.setswitchinterval(5e-3)
    return asked


@pytest.mark.slow
def test_asking_holds_nothing_that_the_end_of_a_collective_needs():
    """Under a profiler gloo's thread takes the GIL there, for saved-tensor hooks; it has the work's lock by then."""
    assert run_ranks(1, _asked_while_they_end)[0] > 0


# -- two legs ----------------------------------------------------------------------------------------------------------


class Leg:
    """The work and the watch of a leg: it arrives when it is made to, and is known by its name."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.arrived = self.failed = False

    def is_completed(self) -> bool:
        return self.arrived

    def wait(self, timeout: object = None) -> None:
        pass

    def hold(self, handle: Handle, work: Leg) -> None:
        self.log.append(f"wait {self.name}")
        if self.failed:
            raise CollectiveError(self.name)
        self.arrived = True

    def handle(self) -> Handle:
        made = Handle(self, lambda: self.log.append(f"arrived {self.name}"))
        made.watch = self
        return made


class Reduction:
    """A reduction over a grid, with its two legs."""

    def __init__(self, legs: SecondLegs, number: int, log: list[str]) -> None:
        self.legs, self.first, self.second = legs, Leg(f"within {number}", log), Leg(f"across {number}", log)

        def issue() -> Handle:
            log.append(f"issue {number}")
            return self.second.handle()

        self.handle = legs.add(self.first.handle(), issue)
        self.handle.then(lambda: log.append(f"then {number}"))

    @property
    def state(self) -> str:
        if self.handle._second is not None:
            return "WITHIN"
        return "ARRIVED" if self.handle._work is None else "ACROSS"

    def do(self, event: str) -> None:
        if event.startswith("go_on"):
            self.first.arrived = event == "go_on, arrived"
            self.legs.issue_arrived(0)
            return
        self.first.failed, self.second.failed = "leg 1" in event, "leg 2" in event
        with pytest.raises(CollectiveError) if "fails" in event else contextlib.nullcontext():
            self.handle.wait()


CELLS = {key: cell for key, cell in table(__doc__, "event").items() if cell != "--"}


@pytest.mark.parametrize(("event", "before"), CELLS)
def test_a_cell(event, before):
    reduction = Reduction(SecondLegs(), 1, [])
    if before != "WITHIN":
        reduction.do("wait" if before == "ARRIVED" else "go_on, arrived")
    assert reduction.state == before
    reduction.do(event)
    assert reduction.state == CELLS[event, before]


def test_second_legs_leave_in_the_order_of_first_ones():
    log: list[str] = []
    legs = SecondLegs()
    reductions = [Reduction(legs, number, log) for number in range(3)]
    reductions[1].first.arrived = True
    legs.issue_arrived(0)
    assert log == [], "the one before has not arrived"
    reductions[2].handle.wait()
    assert [line for line in log if line.startswith("issue")] == ["issue 0", "issue 1", "issue 2"]
    assert log[-3:] == ["wait across 2", "arrived across 2", "then 2"]


def test_what_has_arrived_leaves_where_another_is_awaited():
    log: list[str] = []
    legs = SecondLegs()
    first, second = Reduction(legs, 1, log), Reduction(legs, 2, log)
    second.first.arrived = True
    first.handle.wait()
    waits = [line for line in log if not line.startswith("arrived")]
    assert waits == ["wait within 1", "issue 1", "wait within 2", "issue 2", "wait across 1", "then 1"]


def test_a_wait_after_a_failure_raises_again():
    log: list[str] = []
    legs = SecondLegs()
    first, second = Reduction(legs, 1, log), Reduction(legs, 2, log)
    first.first.failed = True
    for reduction in (second, first, second):
        with pytest.raises(CollectiveError, match="within 1"):
            reduction.handle.wait()
    assert not any(line.startswith("issue") for line in log)


def test_abandoned_legs_are_not_issued():
    log: list[str] = []
    reduction = Reduction(SecondLegs(), 1, log)
    reduction.first.arrived = True
    reduction.legs.abandon()
    reduction.legs.issue_arrived(0)
    assert log == [] and reduction.state == "WITHIN"


def test_where_a_stream_waits_the_error_names_the_call_too() -> None:
    handle = Handle(FakeWork("failed"))
    handle.traffic, handle.call = Traffic("exchange"), "full_state_dict"
    with pytest.raises(CollectiveError, match="exchange did not complete.*every rank has to call full_state_dict"):
        handle.wait()
