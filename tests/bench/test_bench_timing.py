"""Rounds are interleaved, laps add up, and events are read only when the round is over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from zero_optim.bench import timing
from zero_optim.bench.timing import EventClock, HostClock, Job, Spread, TimedRounds, interleaved


class CountingClock:
    """Every lap takes one millisecond more than the one before it."""

    warm_up_seconds = 0.0

    def __init__(self) -> None:
        self.laps = 0

    def time(self, job: Job) -> Callable[[], list[float]]:
        taken = []
        for lap in job:
            lap()
            self.laps += 1
            taken.append(float(self.laps))
        return lambda: taken


def test_every_round_runs_all_jobs_and_starts_at_the_next():
    calls: list[str] = []
    jobs = {name: [lambda name=name: calls.append(name)] for name in "abc"}
    times = interleaved(jobs, CountingClock(), TimedRounds.exactly(4))
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert rounds == ["abc", "bca", "cab", "abc", "bca", "cab"]
    assert timing.WARM_UP_ROUNDS == 2
    # What warming up took is not among the times; each is with its own job, whatever the order of the round.
    assert times["a"] == [[8.0], [10.0], [15.0], [17.0]]
    assert times["b"] == [[9.0], [11.0], [13.0], [18.0]]
    assert times["c"] == [[7.0], [12.0], [14.0], [16.0]]


@pytest.mark.parametrize(
    ("done", "seconds", "enough"),
    [(9, 100.0, False), (10, 4.9, False), (10, 5.0, True), (50, 0.0, False), (51, 0.0, True)],
)
def test_rounds_stop_by_time_within_bounds(done, seconds, enough):
    assert TimedRounds(least=10, most=51, seconds=5.0).enough(done, seconds) is enough


def test_an_exact_number_of_rounds_ignores_time():
    assert not TimedRounds.exactly(3).enough(2, 1e9)
    assert TimedRounds.exactly(3).enough(3, 0.0)


def test_the_host_clock_times_laps_one_after_the_other():
    ticks = iter([10.0, 10.5, 12.0])
    assert HostClock(lambda: next(ticks)).time([lambda: None, lambda: None])() == [500.0, 1500.0]


class FakeEvent:
    """Stands in for torch.cuda.Event: the log is the stream, a place in it the time."""

    log: list[object] = []
    synchronized = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.log.append(self)

    def synchronize(self) -> None:
        assert self.log[-1] is self, "the last event of the job covers all before it"
        FakeEvent.synchronized += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return float(self.log.index(end) - self.log.index(self))


def test_events_stand_between_the_laps_and_the_host_does_not_wait_for_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "log", [])
    monkeypatch.setattr(FakeEvent, "synchronized", 0)
    clock = EventClock(torch.device("cpu"), flush_bytes=64)
    read = clock.time([lambda: FakeEvent.log.append("first"), lambda: FakeEvent.log.extend(["second", "third"])])
    assert FakeEvent.synchronized == 0
    assert [isinstance(entry, FakeEvent) for entry in FakeEvent.log] == [True, False, True, False, False, True]
    assert read() == [2.0, 3.0]
    assert FakeEvent.synchronized == 1


def test_the_cache_is_emptied_before_the_first_event(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "log", [])
    clock = EventClock(torch.device("cpu"), flush_bytes=64)
    assert clock._flush.numel() * clock._flush.element_size() == 64

    class Flush:
        def sum(self) -> None:
            FakeEvent.log.append("read")

    clock._flush = Flush()
    clock.time([lambda: FakeEvent.log.append("job")])
    assert FakeEvent.log[: timing.FLUSH_READS] == ["read"] * timing.FLUSH_READS
    assert isinstance(FakeEvent.log[timing.FLUSH_READS], FakeEvent)
    assert FakeEvent.log[timing.FLUSH_READS + 1] == "job"


def test_the_spread_of_times():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0]) == Spread(3.5, 2.0, 5.0, 6)
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5, 1)
