"""Every cell of the table in ``comm/chain.py``, and the order in which second legs leave."""

from __future__ import annotations

import pytest
from zero_optim.comm import chain
from zero_optim.comm.chain import Chain, ChainQueue, Leg
from zero_optim.errors import CollectiveError


class Flying:
    """A collective that arrives when it is told to, and is known by its name."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.arrived = self.failed = False

    def arrives_within(self, seconds: float) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        if self.failed:
            raise CollectiveError(self.name)
        self.arrived = True


class Flight:
    """A chain with its two legs."""

    def __init__(self, queue: ChainQueue, number: int, log: list[str]) -> None:
        self.first, self.second = Flying(f"within {number}", log), Flying(f"across {number}", log)

        def issue() -> Flying:
            log.append(f"issue {number}")
            return self.second

        self.chain: Chain = queue.add(self.first, issue)


def _in(state: Leg) -> Flight:
    flight = Flight(ChainQueue(), 1, [])
    if state is not Leg.WITHIN:
        flight.chain.wait() if state is Leg.ARRIVED else _go_on(flight, arrived=True)
    assert flight.chain.leg is state
    return flight


def _go_on(flight: Flight, *, arrived: bool) -> None:
    flight.first.arrived = arrived
    flight.chain._queue.go_on_with_arrived(0)


def _do(flight: Flight, event: str) -> None:
    if event.startswith("go_on"):
        _go_on(flight, arrived=event == "go_on, arrived")
        return
    flight.first.failed, flight.second.failed = "leg 1" in event, "leg 2" in event
    if "fails" in event:
        with pytest.raises(CollectiveError):
            flight.chain.wait()
    else:
        flight.chain.wait()


def _rows() -> list[tuple[str, Leg, Leg]]:
    _, table = (chain.__doc__ or "").split("event ", 1)
    head, *lines = f"event {table}".splitlines()
    columns = [head.index(name) for name in ("WITHIN", "ACROSS", "ARRIVED")]
    found = []
    for line in lines:
        cells = [line[start:end].strip() for start, end in zip(columns, [*columns[1:], None], strict=True)]
        found += [
            (line[: columns[0]].strip(), state, Leg[cell])
            for state, cell in zip(Leg, cells, strict=True)
            if cell and cell != "--" and not cell.startswith("=")
        ]
    return found


def test_the_table_has_every_event():
    assert len(_rows()) == 3 * 3 + 1 + 2


@pytest.mark.parametrize(("event", "before", "after"), _rows())
def test_a_cell(event, before, after):
    flight = _in(before)
    _do(flight, event)
    assert flight.chain.leg is after


def test_second_legs_leave_in_the_order_of_first_ones():
    log: list[str] = []
    queue = ChainQueue()
    flights = [Flight(queue, number, log) for number in range(3)]
    flights[1].first.arrived = True
    queue.go_on_with_arrived(0)
    assert log == [], "the one before has not arrived"
    flights[2].chain.wait()
    assert [line for line in log if line.startswith("issue")] == ["issue 0", "issue 1", "issue 2"]
    assert log[-1] == "wait across 2"


def test_what_has_arrived_leaves_where_another_is_awaited():
    log: list[str] = []
    queue = ChainQueue()
    first, second = Flight(queue, 1, log), Flight(queue, 2, log)
    second.first.arrived = True
    first.chain.wait()
    assert log == ["wait within 1", "issue 1", "wait within 2", "issue 2", "wait across 1"]


def test_who_waits_again_after_a_failure_hears_of_it_again():
    log: list[str] = []
    queue = ChainQueue()
    first, second = Flight(queue, 1, log), Flight(queue, 2, log)
    first.first.failed = True
    for flight in (second, first, second):
        with pytest.raises(CollectiveError, match="within 1"):
            flight.chain.wait()
    assert not any(line.startswith("issue") for line in log)


def test_an_abandoned_queue_issues_nothing():
    log: list[str] = []
    queue = ChainQueue()
    flight = Flight(queue, 1, log)
    flight.first.arrived = True
    queue.abandon()
    queue.go_on_with_arrived(0)
    assert log == [] and flight.chain.leg is Leg.WITHIN
