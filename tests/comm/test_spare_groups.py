"""Process groups that were left are taken again, by all ranks alike; none is made under different names."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch.distributed as dist
from zero_optim import RankMismatchError
from zero_optim.comm import groups


class Group:
    def __init__(self, name: str) -> None:
        self.group_name = name


class TwoOfFour:
    """This rank's report, and what the other one says."""

    rank, world_size = 0, 2

    def __init__(self, *, other_left: set[str] = frozenset(), other_count: int, other_needs: bool = False) -> None:
        self._other = other_needs, set(other_left), other_count

    def gather_objects(self, value: Any, where: str) -> list[Any]:
        return [value, self._other if isinstance(value, tuple) else self._other[2]]


@pytest.fixture
def left(monkeypatch) -> list[Group]:
    """This rank is in three groups, and has left two."""
    there = [Group("5"), Group("7"), Group("9")]
    for group in there:
        monkeypatch.setitem(dist.distributed_c10d._world.pg_names, group, group.group_name)
    monkeypatch.setattr(groups, "_left", {})
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    groups.leave([0, 1], map(weakref.ref, there[:2]))
    return there


def make() -> Group:
    return Group("new")


def test_what_all_have_left_is_taken_once(left):
    both = TwoOfFour(other_left={"7"}, other_count=3)
    assert groups.take(both, [0, 1], make, "here", needed=True) is left[1]
    assert groups.take(both, [0, 1], make, "here", needed=True).group_name == "new", "7 is in use"
    assert groups.take(TwoOfFour(other_left={"5"}, other_count=3), [0, 1], make, "here", needed=True) is left[0]


def test_a_group_that_was_destroyed_is_not_taken(left, monkeypatch):
    monkeypatch.delitem(dist.distributed_c10d._world.pg_names, left[1])
    assert groups.take(TwoOfFour(other_left={"7"}, other_count=2), [0, 1], make, "here", needed=True) is not left[1]


def test_ranks_in_different_numbers_of_groups_make_none(left):
    assert groups.take(TwoOfFour(other_count=4), [0, 1], make, "here", needed=False) is None
    for here, there in ((True, False), (False, True)):
        with pytest.raises(RankMismatchError, match=r"some of them are in more groups than others"):
            groups.take(TwoOfFour(other_count=4, other_needs=there), [0, 1], make, "here", needed=here)
    assert not groups.can_be_made(TwoOfFour(other_count=4))
    assert groups.can_be_made(TwoOfFour(other_count=3))
