"""Interleaved timing. A figure is a ratio of medians measured in one run, so all jobs meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

Job = Sequence[Callable[[], object]]
"""A thing to be timed: laps, run one right after the other. Most jobs have one."""

WARM_UP_ROUNDS = 2

# More than the last-level cache of any GPU, four times: 0.25 ms on an H200 (4.3 TB/s). Meanwhile the host gets far
# enough ahead that the device's work is timed, and not its launching by Python.
FLUSH_BYTES = 256 * 2**20
FLUSH_READS = 4


class Clock(Protocol):
    """A clock that times jobs. ``warm_up_seconds``: for at least so long, rounds are thrown away first."""

    warm_up_seconds: float

    def time(self, job: Job) -> Callable[[], list[float]]:
        """Run the job. The result, called when the round is over, gives the milliseconds of each lap."""
        ...


class HostClock:
    """A clock for a CPU, where an op has done its work when it returns. ``now``: gives seconds."""

    warm_up_seconds = 0.0

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def time(self, job: Job) -> Callable[[], list[float]]:
        marks = [self._now()]
        for lap in job:
            lap()
            marks.append(self._now())
        return lambda: [(end - begin) * 1e3 for begin, end in pairwise(marks)]


class EventClock:
    """A clock for a GPU, by events on the current stream. No job finds its tensors in the cache.

    The cache is flushed by reads: written lines would still have to go to memory while the job is timed.
    """

    warm_up_seconds = 0.2  # an idle GPU needs some of it to raise its clocks

    def __init__(self, device: torch.device, flush_bytes: int = FLUSH_BYTES) -> None:
        self._flush = torch.ones(flush_bytes // 4, device=device)

    def time(self, job: Job) -> Callable[[], list[float]]:
        for _ in range(FLUSH_READS):
            self._flush.sum()
        marks = [self._mark()]
        for lap in job:
            lap()
            marks.append(self._mark())

        def milliseconds() -> list[float]:
            marks[-1].synchronize()
            return [begin.elapsed_time(end) for begin, end in pairwise(marks)]

        return milliseconds

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def make_clock(device: torch.device) -> Clock:
    return EventClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class TimedRounds:
    """The number of rounds to time: as many as ``seconds`` allow, between ``least`` and ``most``."""

    least: int = 10
    most: int = 51
    seconds: float = 5.0

    @staticmethod
    def exactly(count: int) -> TimedRounds:
        return TimedRounds(count, count)

    def enough(self, done: int, seconds: float) -> bool:
        return done >= self.most or (done >= self.least and seconds >= self.seconds)


def interleaved(jobs: Mapping[str, Job], clock: Clock, rounds: TimedRounds) -> dict[str, list[list[float]]]:
    """Time each lap of each job in each round, in milliseconds.

    Every round runs all jobs, and starts with the next one. So a slow spell of the machine, or an effect of the job
    before, meets all of them alike.
    """
    names = list(jobs)
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    turn = 0

    def one_round() -> dict[str, list[float]]:
        nonlocal turn
        start = turn % len(names)
        turn += 1
        readings = {name: clock.time(jobs[name]) for name in names[start:] + names[:start]}
        return {name: read() for name, read in readings.items()}

    begin = time.perf_counter()
    while turn < WARM_UP_ROUNDS or time.perf_counter() - begin < clock.warm_up_seconds:
        one_round()
    begin, done = time.perf_counter(), 0
    while not rounds.enough(done, time.perf_counter() - begin):
        for name, laps in one_round().items():
            times[name].append(laps)
        done += 1
    return times


@dataclass(frozen=True)
class Spread:
    """Milliseconds over the rounds: median, 20th and 80th percentile."""

    ms: float
    p20: float
    p80: float
    rounds: int

    @property
    def figures(self) -> list[float]:
        """The three in one list, as a row has them."""
        return [self.ms, self.p20, self.p80]

    @staticmethod
    def of(times: Sequence[float]) -> Spread:
        fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else [times[0]] * 4
        ms, p20, p80 = (round(figure, 5) for figure in (statistics.median(times), fifths[0], fifths[3]))
        return Spread(ms, p20, p80, len(times))
