"""What each rank raises where some have failed: alike, or each its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from zero_optim import CheckpointError, RankMismatchError
from zero_optim.comm.collectives import Comm
from zero_optim.comm.together import check_same, gathered, on_rank_0, together, values_of_one_call


class Rank:
    """One of several, each a thread."""

    def __init__(self, rank: int, world_size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self._table, self._barrier = rank, world_size, table, barrier
        self.ranks = range(10, 10 + world_size)  # as the whole job numbers them

    def gather_objects(self, value: Any, where: str) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(60)
        values = list(self._table)
        self._barrier.wait(60)
        return values

    def exchange(self, vector: torch.Tensor, **options: Any) -> None:
        vector.fill_(max(self.gather_objects(float(vector), "asked")))


def on_ranks(count: int, program: Callable[[Rank], Any]) -> list[Any]:
    """What each rank's program returned, or the exception that it raised."""
    table, barrier, found = [None] * count, threading.Barrier(count), [None] * count

    def run(rank: int) -> None:
        try:
            found[rank] = program(Rank(rank, count, table, barrier))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def failing(*errors: Exception | None) -> Callable[[Rank], Callable[[], int]]:
    def work_of(ranks: Rank) -> Callable[[], int]:
        def work() -> int:
            if (error := errors[ranks.rank]) is not None:
                raise error
            return 10 * ranks.rank

        return work

    return work_of


def told(found: list[Any]) -> list[tuple[type, str]]:
    return [(type(error), str(error)) for error in found]


def test_without_a_failure_all_go_on():
    work = failing(None, None)
    assert on_ranks(2, lambda ranks: gathered(ranks, work(ranks), "here")) == [[0, 10]] * 2
    assert on_ranks(2, lambda ranks: together(ranks, work(ranks), "here")) == [0, 10]
    assert on_ranks(2, lambda ranks: on_rank_0(ranks, lambda: 7 if ranks.rank == 0 else 1 / 0, "here")) == [7, 7]


def test_alike_all_raise_what_the_lowest_raised():
    work = failing(None, CheckpointError("torn"), ValueError("other"), CheckpointError("torn here too"))
    found = on_ranks(4, lambda ranks: together(ranks, work(ranks), "here"))
    named = (CheckpointError, "on rank 11: torn")
    assert told(found) == [named, (CheckpointError, "torn"), named, (CheckpointError, "torn here too")]
    assert str(found[2].__cause__) == "other"


def test_alike_other_types_are_named():
    work = failing(None, ZeroDivisionError("0"))
    found = on_ranks(2, lambda ranks: together(ranks, work(ranks), "here"))
    assert told(found) == [(RankMismatchError, "rank 11 failed with ZeroDivisionError: 0"), (ZeroDivisionError, "0")]


@pytest.mark.parametrize("asks", (True, False))
def test_each_its_own(asks):
    work = failing(None, CheckpointError("torn"), ValueError("other"))

    def program(ranks: Rank) -> None:
        with Comm.raising_together(ranks, "here", torch.device("cpu") if asks else None):
            work(ranks)()

    named = "rank 11 failed with CheckpointError: torn; rank 12 failed with ValueError: other"
    assert told(on_ranks(3, program)) == [(RankMismatchError, named), (CheckpointError, "torn"), (ValueError, "other")]


def test_each_its_own_gathers_no_report_where_none_has_failed():
    def program(ranks: Rank) -> None:
        with Comm.raising_together(ranks, "here", torch.device("cpu")):
            pass
        assert ranks._table == [0.0, 0.0], "the flags came last"

    assert on_ranks(2, program) == [None, None]


def test_the_first_difference_is_named_on_all():
    for other in (["a=1", "b=3"], ["a=1"]):
        found = on_ranks(2, lambda ranks, other=other: check_same(ranks, [["a=1", "b=2"], other][ranks.rank], "f", "g"))
        there = other[1] if len(other) > 1 else "nothing more"
        words = (
            f"rank 11 differs from rank 10: rank 10 has b=2; rank 11 has {there}. Every rank must g the same arguments"
        )
        assert told(found) == [(RankMismatchError, words)] * 2
    assert on_ranks(2, lambda ranks: check_same(ranks, ["a"], "f", "g")) == [None, None]


def test_values_are_of_one_call_of_one_optimizer():
    assert values_of_one_call([4, 6], [("save", "1", 5), ("save", "1", 6)]) == [5, 6]
    with pytest.raises(RankMismatchError, match="rank 4 is in save, rank 6 in load"):
        values_of_one_call([4, 6], [("save", "1", 5), ("load", "1", 6)])
    with pytest.raises(RankMismatchError, match="ranks 4 and 8 are in save of different optimizers"):
        values_of_one_call([4, 6, 8], [("save", "1", 5), ("save", "1", 6), ("save", "2", 7)])
