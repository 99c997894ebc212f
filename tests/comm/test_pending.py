"""Waiting for several collectives as one: a failure is told at once, whatever the others do."""

from __future__ import annotations

import sys

import pytest
import torch
from harness import run_ranks
from zero_optim.comm import collectives, gloo
from zero_optim.comm.collectives import Comm, Pending, Traffic
from zero_optim.comm.gloo import GLOO, Works
from zero_optim.comm.standstill import Verdict
from zero_optim.comm.transport import Issued
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


class FakeComm:
    """What a wait under gloo asks of its comm."""

    own_group = None
    out_of_step = False

    def abandon(self) -> None:
        self.out_of_step = True

    def given_up(self) -> None:
        return None

    def check_not_parted(self) -> None:
        pass


def _pending(*outcomes: str) -> Pending:
    works = Works([FakeWork(outcome) for outcome in outcomes])
    return Pending(Issued(works), Traffic("all_gather"), comm=FakeComm())


def test_several_arrive_when_all_have():
    assert _pending("arrived", "arrived").arrives_within(0)
    assert not _pending("arrived", "never").arrives_within(1)
    assert not _pending("never", "arrived").arrives_within(1)


@pytest.mark.parametrize("outcomes", [("failed", "never"), ("arrived", "failed", "never"), ("never", "failed")])
def test_one_that_failed_ends_the_wait_for_all(outcomes):
    pending = _pending(*outcomes)
    assert not pending.arrives_within(0)  # nobody has asked the one that failed yet
    assert pending.arrives_within(1)
    with pytest.raises(CollectiveError, match="Connection closed by peer"):
        pending.wait()


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
    monkeypatch.setattr(gloo.time, "sleep", thread.sleep)
    works = Works([FakeWork("arrived")], [view])
    assert works.is_completed() and view._use_count() == 2
    works.wait()
    assert view._use_count() == 1 and thread.given == ways
    assert works.is_completed()


def test_a_thread_that_never_lets_go_does_not_hold_the_wait(monkeypatch):
    view = torch.zeros(4).view(-1)
    thread = LetsGoLate(view, float("inf"))
    monkeypatch.setattr(gloo.time, "sleep", thread.sleep)
    monkeypatch.setattr(gloo, "LETS_GO_WITHIN", 0.0)
    Works([FakeWork("arrived")], [view]).wait()
    assert view._use_count() == 2


class ToldOnce:
    """Of a standstill: another rank has given up. What it says is there until this rank says that it waits no more."""

    def __init__(self) -> None:
        self.told: Verdict | None = Verdict("the ranks wait for each other")

    def look(self, wait: object) -> None:
        raise AssertionError("it has failed: nothing is waited for")

    def verdict(self) -> Verdict | None:
        return self.told

    def ended(self) -> None:
        self.told = None


def test_a_rank_that_gave_up_is_heard_before_its_closed_connection(monkeypatch):
    """It writes why, raises and leaves: the connection may close before this rank has looked again."""
    standstill = ToldOnce()
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    comm = Comm(None)
    monkeypatch.setattr(Comm, "own_group", object())
    monkeypatch.setattr(comm, "standstill", lambda: standstill)
    pending = Pending(Issued(Works([FakeWork("failed")])), Traffic("all_reduce"), comm=comm)
    with pytest.raises(RankMismatchError, match="the ranks wait for each other"):
        pending.wait()
    assert standstill.told is None and comm.out_of_step


class Unasked(FakeWork):
    """A collective on a device: whether it is over depends on timing, so nothing may ask."""

    def is_completed(self) -> bool:
        raise AssertionError("asked whether it has arrived")


def test_where_the_stream_waits_nobody_asks():
    """The host would launch what follows sooner or later, and on every rank at another time."""
    pending = Pending(Issued(Unasked("arrived")), Traffic("reduce_scatter"))
    assert pending.arrives_within(0) and pending.arrives_within(1)
    pending.wait()
    assert pending.arrives_within(0)


def _asked_while_they_end(rank: int, world_size: int) -> int:
    asked = 0
    sys.setswitchinterval(1e-4)  # the two threads then meet: on one core within 1200 collectives, in 8 of 8 runs
    with torch.profiler.profile(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        for _ in range(1500):
            work = GLOO.all_reduce(torch.ones(1), None).work
            while not work.is_completed():
                asked += 1
    sys.setswitchinterval(5e-3)
    return asked


@pytest.mark.slow
def test_asking_holds_nothing_that_the_end_of_a_collective_needs():
    """Under a profiler gloo's thread takes the GIL there, for saved-tensor hooks; it has the work's lock by then."""
    assert run_ranks(1, _asked_while_they_end)[0] > 0
