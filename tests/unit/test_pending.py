"""Waiting for several collectives as one: a failure is told at once, whatever the others do."""

from __future__ import annotations

import pytest
from zero_optim.comm.collectives import Pending, Traffic
from zero_optim.comm.gloo import Works
from zero_optim.comm.transport import Issued
from zero_optim.errors import CollectiveError


class FakeWork:
    """A collective that has arrived, has failed or never arrives; a wait for one of the last kind takes no time."""

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    def is_completed(self) -> bool:
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

    def given_up(self) -> None:
        return None


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
