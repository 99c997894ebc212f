"""After a warm-up further steps leave nothing behind: every count of what a process has is the same, exactly."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
from collections import Counter, deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from cells import slow_where
from harness import await_ended_groups, new_ranks, run_ranks
from torch import Tensor, nn
from torch.autograd.graph import Node
from training_cases import TINY_CAP_MB, Planned, maybe_no_sync, raise_in_backward
from zero_optim.comm.deadlock import Record, Wait

PERIOD = 12  # steps, in which everything comes that a step may be
WARM_UP_PERIODS, PERIODS = 2, 3
LOOKS = 20  # to find the counts at rest
CONTAINERS = (list, dict, set, deque)
FILES_BEFORE: Counter[str] = Counter()  # the training: the other rank may close a connection of tests before
HOOKS_OF_A_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")

# -- what a process has ------------------------------------------------------------------------------------------------


def open_files() -> Counter[str]:
    """What this process has open, and how often: a path, or a kind and a number of its own, as ``socket:[4711]``."""
    links: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links[os.readlink(f"/proc/self/fd/{number}")] += 1
    return links


def census() -> dict[str, int]:
    """Collect garbage, then count, of files those that ``FILES_BEFORE`` does not have. Two calls in a row give the
    same.

    Collecting is repeated, as it may leave new garbage: a graph in C++ frees Python objects, a finalizer makes some.
    """
    collections = 20  # the most: another thread may make garbage without end
    while gc.collect() and (collections := collections - 1):
        pass
    types = Counter(map(type, gc.get_objects()))
    return {
        "objects": sum(types.values()),  # tracked by the garbage collector, and not frozen
        "tensors": sum(count for kind, count in types.items() if issubclass(kind, Tensor)),
        "nodes": _nodes(),
        "hooks": _hooks(),
        "files": (open_files() - FILES_BEFORE).total(),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _nodes() -> int:
    """Count the nodes of graphs that a live tensor keeps."""
    found: set[Node] = set()
    ahead = [node for tensor in _live(Tensor) if (node := tensor.grad_fn) is not None]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return len(found)


def _hooks() -> int:
    """Count the hooks of live tensors and modules."""
    of_tensors = sum(len(getattr(tensor, name) or ()) for tensor in _live(Tensor) for name in HOOKS_OF_A_TENSOR)
    tables = [table for module in _live(nn.Module) for name, table in vars(module).items() if name.endswith("_hooks")]
    return of_tensors + sum(map(len, tables))


def _live(kind: type) -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


# -- a training --------------------------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """A unit."""


class Net(nn.Sequential):
    """``raising``: a backward has been through the head when it raises."""

    raising = False

    def forward(self, x: Tensor) -> Tensor:
        *blocks, head = self
        for block in blocks:
            x = block(x)
        return head(raise_in_backward(x) if self.raising else x)


class Loop:
    """A training that goes through everything again and again."""

    def __init__(self, rank: int, stage: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = Net(*(Block(nn.Linear(12, 12), nn.LayerNorm(12)) for _ in range(2)), nn.Linear(12, 3)).half()
        if stage == 3:
            zero_optim.shard_module(self.model, (Block,))
        named = self.model.named_parameters()
        self.opt = zero_optim.ShardedAdamW(named, lr=1e-3, stage=stage, bucket_cap_mb=TINY_CAP_MB)
        self.scaler = zero_optim.GradScaler(init_scale=64.0, growth_interval=5)

    def period(self) -> None:
        for step in range(PERIOD):
            self.step(step)

    def step(self, step: int) -> None:
        """Every second step adds up two backwards, every third is clipped, and in every fourth another backward raises,
        of rank 0 or of all. The last of a period is none of those: what ranks owe each other has arrived."""
        for micro in range(micros := 1 + step % 2):
            with maybe_no_sync(self.opt, micro < micros - 1):
                self.backward(overflows=step == 10)
        if step % 4 == 1:
            self.raise_and_drop(only_rank_0=step == 5)
            return
        if step % 3 == 0:
            self.scaler.unscale_(self.opt)
            self.opt.clip_grad_norm_(1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=step % 4 < 2)

    def raise_and_drop(self, *, only_rank_0: bool) -> None:
        self.model.raising = self.rank == 0 or not only_rank_0
        with contextlib.suppress(Planned):
            self.backward()
        self.model.raising = False
        self.opt.zero_grad()

    def wait_long(self) -> None:
        """What a rank does that has waited for the others for seconds, and is through then."""
        record = Record()
        record.look(Wait([*range(dist.get_world_size())], "a group", 0, "a reduction"), ())
        record.end()

    def backward(self, overflows: bool = False) -> None:
        inputs = torch.linspace(-1, 1, 60).reshape(5, 12).half() + self.rank
        loss = self.model(inputs).float().square().mean()
        self.scaler.scale(loss * torch.inf if overflows else loss).backward()


def counts() -> dict[str, int]:
    """The census; what is in containers; and the objects by type, so that a failure names what grew."""
    counted, objects = census(), gc.get_objects()
    entries = sum(len(thing) for thing in objects if type(thing) in CONTAINERS)
    return {**counted, "entries": entries, **Counter(f"{type(thing)}" for thing in objects)}


def changes(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What is not the same, before and after."""
    pairs = {name: (before.get(name, 0), after.get(name, 0)) for name in {**before, **after}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def told() -> str:
    """The counts as a text: it is no object that is counted."""
    return json.dumps(counts(), sort_keys=True)


def fewest() -> str:
    """The counts at rest: for some moments after a collective has arrived a tensor more may be there, or a context
    (seen). Another thread holds it, perhaps."""
    few = told()
    for _ in range(LOOKS):
        os.sched_yield()
        text = told()
        few = text if json.loads(text)["objects"] < json.loads(few)["objects"] else few
    return few


def same_as(before: str) -> str:
    """The counts as soon as they are those of ``before``. What is left behind stays, however often one looks."""
    text = told()
    for _ in range(LOOKS):
        if text == before:
            break
        os.sched_yield()
        text = told()
    return text


def train(rank: int, world_size: int, stage: int) -> list[dict[str, int]]:
    """The counts after the warm-up, and after each period."""
    await_ended_groups()  # their threads are counted, and would end meanwhile
    FILES_BEFORE.clear()
    FILES_BEFORE.update(open_files())
    gc.freeze()  # what is imported is not counted: that takes half a second
    loop, texts = Loop(rank, stage), [""] * (1 + PERIODS)
    for _ in range(WARM_UP_PERIODS):
        loop.period()
        fewest()
    if world_size > 1:
        loop.wait_long()  # the first wait starts the detector's thread
    texts[0] = fewest()
    for place in range(1, 1 + PERIODS):
        if world_size > 1:
            loop.wait_long()
        loop.period()
        texts[place] = same_as(texts[0])
    assert loop.opt.stats()["skipped_steps"] == WARM_UP_PERIODS + PERIODS
    loop.opt.close()
    return [json.loads(text) for text in texts]


@pytest.fixture(scope="module", autouse=True)
def _no_threads_of_other_tests() -> None:
    """A thread that waits with a time-out has a lock and a method more when it waits again."""
    new_ranks()


@pytest.mark.parametrize(
    ("stage", "world_size"),
    slow_where({(0, 1), (1, 1), (1, 2)}.__contains__, itertools.product(range(4), (1, 2))),
)
def test_further_steps_leave_nothing_behind(stage, world_size):
    for first, *later in run_ranks(world_size, train, stage):
        assert min(first["objects"], first["tensors"], first["hooks"], first["threads"]) > 0
        assert [changes(first, after) for after in later] == [{}] * PERIODS


def test_the_census_sees_what_is_left():
    gc.freeze()  # what other tests have left is not counted
    census()
    before = census()
    weight = nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(print)
    kept = [weight, (weight * 2).sum(), open(__file__)]  # noqa: SIM115
    grown = {name: count - before[name] for name, count in census().items()}
    assert (grown["tensors"], grown["nodes"], grown["hooks"], grown["files"], grown["threads"]) == (2, 3, 1, 1, 0)
    assert grown["objects"] >= len(kept)
    kept[-1].close()
    gc.unfreeze()
