"""Timing in turns. A figure is a ratio of medians from one run, so all jobs meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Job = Sequence[Callable[[], object]]
"""Laps, run one right after the other. Most jobs have one."""

WARM_UP_ROUNDS = 2
LEAST, MOST, SECONDS = 10, 51, 5.0


class Clock:
    """Times jobs by the host's clock: for a CPU, where an op has done its work when it returns.

    ``warm_up_seconds``: for at least so long, rounds are thrown away first.
    """

    warm_up_seconds = 0.0

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def time(self, job: Job) -> Callable[[], list[float]]:
        """Run the job. The result, called when the round is over, gives the milliseconds of each lap."""
        marks = [self._now()]
        for lap in job:
            lap()
            marks.append(self._now())
        return lambda: [(end - begin) * 1e3 for begin, end in pairwise(marks)]


class EventClock(Clock):
    """For a GPU: CUDA events on the current stream, after a flush of the last-level cache."""

    warm_up_seconds = 0.2  # an idle GPU needs some of it to raise its clocks

    def __init__(self, device: torch.device, flush_bytes: int = 256 * 2**20) -> None:
        self._flush = torch.ones(flush_bytes // 4, device=device)

    def time(self, job: Job) -> Callable[[], list[float]]:
        # It reads 256 MiB, more than any GPU's L2: writes would still be in flight while the job is timed. Four times
        # take 0.25 ms on an H200, in which the host gets so far ahead that launches from Python are not timed.
        for _ in range(4):
            self._flush.sum()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(job) + 1)]
        marks[0].record()
        for lap, mark in zip(job, marks[1:], strict=True):
            lap()
            mark.record()

        def milliseconds() -> list[float]:
            marks[-1].synchronize()  # only once the round is launched, so that the host never waits between jobs
            return [begin.elapsed_time(end) for begin, end in pairwise(marks)]

        return milliseconds


def make_clock(device: torch.device) -> Clock:
    return EventClock(device) if device.type == "cuda" else Clock()


def interleaved(jobs: Mapping[str, Job], clock: Clock, rounds: int | None = None) -> dict[str, list[list[float]]]:
    """Time each lap of each job in each round, in milliseconds.

    Every round runs all jobs, and starts with the next one: a slow spell of the machine, or an effect of the job
    before, meets all of them alike. ``rounds``: their number; None: LEAST to MOST, as many as SECONDS allow.
    """
    names = list(jobs)
    times: dict[str, list[list[float]]] = {name: [] for name in names}

    def one_round(turn: int) -> dict[str, list[float]]:
        start = turn % len(names)
        readings = {name: clock.time(jobs[name]) for name in names[start:] + names[:start]}
        return {name: read() for name, read in readings.items()}

    turn, begin = 0, time.perf_counter()
    while turn < WARM_UP_ROUNDS or time.perf_counter() - begin < clock.warm_up_seconds:
        one_round(turn)
        turn += 1
    begin = time.perf_counter()
    for done in range(rounds or MOST):
        if rounds is None and done >= LEAST and time.perf_counter() - begin >= SECONDS:
            break
        for name, laps in one_round(turn + done).items():
            times[name].append(laps)
    return times


@dataclass(frozen=True)
class Spread:
    """Milliseconds over the rounds: median, 20th and 80th percentile."""

    ms: float
    p20: float
    p80: float
    rounds: int

    @staticmethod
    def of(times: Sequence[float]) -> Spread:
        fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else [times[0]] * 4
        ms, p20, p80 = (round(figure, 5) for figure in (statistics.median(times), fifths[0], fifths[3]))
        return Spread(ms, p20, p80, len(times))
