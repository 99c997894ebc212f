"""Work that ranks do together: what fails on one of them fails on all.

There are two rules for what the ranks raise where some have failed:

- *Alike* (``gathered``, ``together``, ``on_rank_0``): all raise the same type, so that all go on alike. A checkpoint
  that one rank finds damaged is passed over by all of them.
- *Each its own* (``Comm.raising_together``): a rank that has failed raises its own error, and the others
  ``RankMismatchError``, which names it. So whoever reads the output of one rank knows whether that one was at fault.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from ..errors import CheckpointError, ParameterError, RankMismatchError, StateMismatchError, UsageError

T = TypeVar("T")

# Types that every rank raises where the lowest rank that failed does.
_KEPT = {kind.__name__: kind for kind in (CheckpointError, ParameterError, StateMismatchError, UsageError)}


class Ranks(Protocol):
    """``Comm``, or ``HostRanks``."""

    rank: int
    world_size: int

    @property
    def ranks(self) -> Sequence[int]:
        """Their numbers in the whole job, which messages name."""

    def gather_objects(self, value: Any, where: str) -> list[Any]: ...


# -- alike -------------------------------------------------------------------------------------------------------------


def gathered(ranks: Ranks, work: Callable[[], T], where: str) -> list[T]:
    """Collective. Do ``work`` on every rank. Returns the results, which are pickled, in rank order.

    Where it raised on any rank, all raise: the lowest such rank its own error, the others one of the same type that
    names this rank.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    failure = None if error is None else (type(error).__name__, str(error))
    reports = ranks.gather_objects((result, failure), where)
    failures = [(rank, *failed) for rank, (_, failed) in enumerate(reports) if failed is not None]
    if failures:
        rank, kind, message = failures[0]
        # An own error of the same type is as good as that of the lowest rank, with more detail. One of another type
        # is not raised: the ranks would go on differently.
        if error is not None and (rank == ranks.rank or type(error).__name__ == kind):
            raise error
        if kind in _KEPT:
            raise _KEPT[kind](f"on rank {ranks.ranks[rank]}: {message}") from error
        raise RankMismatchError(f"rank {ranks.ranks[rank]} failed with {kind}: {message}") from error
    return [cast(T, result) for result, _ in reports]


def together(ranks: Ranks, work: Callable[[], T], where: str) -> T:
    """Collective. Do ``work`` on every rank. Returns what it gave on this one; raises as ``gathered`` does."""
    done: list[T] = []
    gathered(ranks, lambda: done.append(work()), where)
    return done[0]


def on_rank_0(ranks: Ranks, work: Callable[[], T], where: str) -> T:
    """Collective. Do ``work`` on rank 0. Returns what it gave, on every rank; raises as ``gathered`` does."""
    return cast(T, gathered(ranks, lambda: work() if ranks.rank == 0 else None, where)[0])


# -- the same call, with the same arguments ---------------------------------------------------------------------------


def values_of_one_call(ranks: Sequence[int], reports: Sequence[tuple[str, str, Any]]) -> list[Any]:
    """Take the values out of ``reports``: by rank, the call that it is in, the optimizer whose call it is, the value.
    ``ranks``: as the whole job numbers them.

    Raises RankMismatchError unless all are in the same call: a value of another call would be misread.
    """
    places, owners, values = zip(*reports, strict=True)
    odd = next((rank for rank, place in enumerate(places) if place != places[0]), None)
    if odd is not None:
        raise RankMismatchError(
            f"rank {ranks[0]} is in {places[0]}, rank {ranks[odd]} in {places[odd]}: each rank has to make the same "
            "calls, in the same order. Does each find what it loads?"
        )
    odd = next((rank for rank, owner in enumerate(owners) if owner != owners[0]), None)
    if odd is not None:
        raise RankMismatchError(
            f"ranks {ranks[0]} and {ranks[odd]} are in {places[0]} of different optimizers, or sharded models: each "
            "rank has to make the same calls, in the same order. Where several threads train, give the optimizer of "
            "each a process group of its own, process_group=dist.new_group(), or the model, to shard_module"
        )
    return list(values)


def check_same(ranks: Ranks, description: Sequence[str], where: str, remedy: str) -> None:
    """Collective. Raise RankMismatchError, on every rank, unless all have the same description.

    Hashes are exchanged first, and descriptions only where these differ: for a large model on many ranks they are long.
    """
    digests = ranks.gather_objects(hashlib.sha256("\n".join(description).encode()).digest(), where)
    if len(set(digests)) == 1:
        return
    descriptions = ranks.gather_objects(list(description), where)
    odd = next(rank for rank, other in enumerate(descriptions) if other != descriptions[0])
    pairs = itertools.zip_longest(descriptions[0], descriptions[odd], fillvalue="nothing more")
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    first, other = ranks.ranks[0], ranks.ranks[odd]
    raise RankMismatchError(
        f"rank {other} differs from rank {first}: rank {first} has {here}; rank {other} has {there}. Every rank must "
        f"{remedy} the same arguments"
    )
