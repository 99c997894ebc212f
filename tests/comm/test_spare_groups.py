"""Process groups that were left are taken again, by all ranks alike; none is made under different names."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from script_ranks import run_script
from torch import nn
from zero_optim import RankMismatchError
from zero_optim.comm import groups


class Group:
    def __init__(self, name: str) -> None:
        self.group_name = name


class TwoOfFour:
    """This rank's report, and the other's."""

    rank, world_size, ranks = 0, 2, [0, 1]

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
    monkeypatch.setattr(groups, "_left", {(0, 1): [*map(weakref.ref, there[:2])]})
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    return there


def make() -> Group:
    return Group("new")


def test_what_all_have_left_is_taken_once(left):
    both = TwoOfFour(other_left={"7"}, other_count=3)
    assert groups.take(both, make, "here", needed=True) is left[1]
    assert groups.take(both, make, "here", needed=True).group_name == "new", "7 is in use"
    assert groups.take(TwoOfFour(other_left={"5"}, other_count=3), make, "here", needed=True) is left[0]


def test_a_group_that_was_destroyed_is_not_taken(left, monkeypatch):
    monkeypatch.delitem(dist.distributed_c10d._world.pg_names, left[1])
    assert groups.take(TwoOfFour(other_left={"7"}, other_count=2), make, "here", needed=True) is not left[1]


def test_ranks_in_different_numbers_of_groups_make_none(left):
    assert groups.take(TwoOfFour(other_count=4), make, "here", needed=False) is None
    for here, there in ((True, False), (False, True)):
        with pytest.raises(RankMismatchError, match=r"some of them are in more groups than others"):
            groups.take(TwoOfFour(other_count=4, other_needs=there), make, "here", needed=here)
    with pytest.raises(
        RankMismatchError, match=r"saving in the background cannot be made here: some ranks are in more"
    ):
        groups.HostRanks(TwoOfFour(other_count=4), None)


NOT_DESTROYED = """
import atexit
import sys
import torch
import torch.distributed as dist

# Runs after what zero_optim registers as it is imported.
atexit.register(lambda: print(len(dist.distributed_c10d._world.pg_map)))

import zero_optim

rank, world_size, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size)
model = torch.nn.Linear(8, 8)
opt = zero_optim.ShardedAdamW(model.parameters())
model(torch.ones(1, 8)).sum().backward()
opt.step()
atexit.register(lambda: print(float(zero_optim.full_state_dict(opt)["state"][0]["step"]) if rank == 0 else None))
if rank != 0:
    atexit.register(zero_optim.full_state_dict, opt)
print(len(dist.distributed_c10d._world.pg_map))
"""


@pytest.mark.slow
def test_what_nobody_destroys_is_destroyed_as_the_process_ends(tmp_path):
    """Gloo's threads want the interpreter as they let go of tensors, and abort the process where it has ended."""
    ends = run_script(NOT_DESTROYED, 2, tmp_path)
    assert [end.code for end in ends] == [0, 0], ends
    for rank, end in enumerate(ends):
        before, step, after = end.output.split()
        assert step == ("1.0" if rank == 0 else "None")  # the optimizer was of use until then
        assert int(after) < int(before)


def _groups_of_models(rank: int, world_size: int) -> list[int]:
    """How many process groups there are after each of three models, which the garbage collector frees."""
    counts = []
    for _ in range(3):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        zero_optim.shard_module(model, (nn.Linear,))
        opt = zero_optim.ShardedAdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        opt.step()
        opt.close()
        del model, opt
        gc.collect()
        counts.append(len(dist.distributed_c10d._world.pg_names))
    return counts


def test_a_model_that_is_freed_leaves_its_groups_to_the_next():
    for first, *later in run_ranks(2, _groups_of_models):
        assert later == [first, first]
