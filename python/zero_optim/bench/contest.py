"""A contest on ranks: each contender alone first, in fresh processes, then all in turn in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from ..comm.collectives import Comm
from .ranks import RanksError
from .timing import Clock, Job

T = TypeVar("T")
Say = Callable[[str], object]


def each_alone(
    names: Iterable[str], needed: Container[str], run: Callable[[str], T], say: Say
) -> tuple[dict[str, T], dict[str, str]]:
    """Run each by name. Returns the results, and the error of each that failed, by name.

    Raises RanksError where one of ``needed`` fails.
    """
    results: dict[str, T] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            results[name] = run(name)
        except RanksError as error:
            if name in needed:
                raise
            left_out[name] = str(error)
            say(f"left out: {name}: {error}")
    return results, left_out


class TogetherClock:
    """A clock around another one, which it starts when all ranks have met and each device is idle."""

    warm_up_seconds = 0.0  # ranks must agree on how many rounds there are

    def __init__(self, comm: Comm, device: torch.device, clock: Clock) -> None:
        self._comm, self._clock, self._device = comm, clock, device
        self._token = torch.zeros(1, device=device)

    def time(self, job: Job) -> Callable[[], list[float]]:
        self._comm.exchange(self._token)
        settle(self._device)  # the previous job has ended on every stream
        return self._clock.time(job)


def settle(device: torch.device) -> None:
    """Wait until a GPU has done all its work, copies included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_all(laps: Mapping[str, float]) -> float:
    """Sum the milliseconds of a job's laps."""
    return sum(laps.values())


def slower(of_ranks: Sequence[Mapping[str, Sequence[T]]], length: Callable[[T], float]) -> dict[str, list[T]]:
    """Take the measurement of the slowest rank in each round, for each name."""
    return {
        name: [max(of_round, key=length) for of_round in zip(*(laps[name] for laps in of_ranks), strict=True)]
        for name in of_ranks[0]
    }
