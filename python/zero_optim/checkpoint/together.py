"""Work that ranks do together: what fails on one of them fails on all, with the same type of error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from ..errors import CheckpointError, ParameterError, RankMismatchError, StateMismatchError

T = TypeVar("T")

_KEPT = {kind.__name__: kind for kind in (CheckpointError, ParameterError, StateMismatchError)}


class Ranks(Protocol):
    """``Comm``, or ``HostRanks``."""

    rank: int
    world_size: int

    def gather_objects(self, value: Any, where: str) -> list[Any]: ...


@dataclass(frozen=True)
class _Report(Generic[T]):
    """What a rank has to say: its result, or the type of its error and the message."""

    result: T | None = None
    failure: tuple[str, str] | None = None


def gathered(ranks: Ranks, work: Callable[[], T], where: str) -> list[T]:
    """Collective. Do ``work`` on every rank. Returns what it gave on each, in rank order; it is pickled.

    Where it raised on any rank, all raise: the lowest such rank its own error, the others one of the same type that
    names it. So all go on alike from there.
    """
    error: Exception | None = None
    report: _Report[T]
    try:
        report = _Report(work())
    except Exception as caught:
        error, report = caught, _Report(failure=(type(caught).__name__, str(caught)))
    reports = ranks.gather_objects(report, where)
    failures = [(rank, *of_rank.failure) for rank, of_rank in enumerate(reports) if of_rank.failure is not None]
    if failures:
        rank, kind, message = failures[0]
        if error is not None and (rank == ranks.rank or type(error).__name__ == kind):
            raise error
        if kind in _KEPT:
            raise _KEPT[kind](f"on rank {rank}: {message}") from error
        raise RankMismatchError(f"rank {rank} failed with {kind}: {message}") from error
    return [cast(T, of_rank.result) for of_rank in reports]


def together(ranks: Ranks, work: Callable[[], T], where: str) -> T:
    """Collective. Do ``work`` on every rank. Returns what it gave on this one; raises as ``gathered`` does."""
    done: list[T] = []
    gathered(ranks, lambda: done.append(work()), where)
    return done[0]


def check_agreed(ranks: Ranks, given: Mapping[str, Any], where: str) -> None:
    """Collective. Raise RankMismatchError, on every rank, unless all of them are given the same."""
    reports = gathered(ranks, lambda: dict(given), where)
    for name, value in reports[0].items():
        rank = next((rank for rank, report in enumerate(reports) if report[name] != value), None)
        if rank is not None:
            raise RankMismatchError(
                f"{where} is called with {name} {value!r} on rank 0, and {reports[rank][name]!r} on rank {rank}: every "
                "rank has to make the same call"
            )


def on_rank_0(ranks: Ranks, work: Callable[[], T], where: str) -> T:
    """Collective. Do ``work`` on rank 0. Returns what it gave, on every rank; raises as ``gathered`` does."""
    return cast(T, gathered(ranks, lambda: work() if ranks.rank == 0 else None, where)[0])
