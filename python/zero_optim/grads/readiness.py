"""Learns when gradients become ready, and decides when a bucket's reduction can be launched while backward runs.

The rounds ask ``may_launch(number)``, in ascending order of buckets: ``ByUnits`` at stage 3, else ``ByCounts``. When
backward is over, every bucket is launched.

Ranks agree by the maximum over ranks of one vector, of two fp32 values a parameter and one more: how often gradients
come, and rank 0's order. If every rank had the reports of all others, that would be ranks x parameters: 100 MB on each
of 16,384 ranks, for 700 parameters.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.sharding import Sharding
from ..units.schedule import UnitSchedule
from .bucket import Bucket


class Learned(enum.Enum):
    """The knowledge that ranks have agreed on from backwards that were observed."""

    NOTHING = enum.auto()  # buckets are launched when backward ends, or by a guess
    ORDER = enum.auto()  # the layout is final, and counts are not known: buckets are launched when backward ends
    ALL = enum.auto()  # buckets are launched when their counts are met


@dataclass(frozen=True)
class Observation:
    """The report of what one rank has seen in its backwards.

    Attributes:
        order: parameters in the order in which their gradients became ready.
        counts: how often each became ready in one backward, at most.
        cut_short: whether a backward raised: it may not have shown all.
    """

    order: tuple[int, ...]
    counts: Mapping[int, int]
    cut_short: bool


def merged(own: Observation, sharding: Sharding, count: int) -> list[Observation]:
    """Collective. Merge the ranks' reports on ``count`` parameters into two, from which ``agree`` learns the same."""
    sharding.world.gather_objects(None, "the first step")  # raises unless all ranks are here
    vector = _vector(own, count, orders=sharding.world.rank == 0).to(sharding.device)
    sharding.world.exchange(vector, maximum=True, kind="construction")
    return _reports(vector, count)


def _vector(own: Observation, count: int, *, orders: bool) -> Tensor:
    """[2 * count + 1] fp32: how often each parameter came at most, its place in rank 0's order from 1 on, and whether a
    backward was cut short. ``orders``: whether this rank's order counts."""
    vector = torch.zeros(2 * count + 1, dtype=torch.float32, device="cpu")
    times, places, cut_short = vector.split([count, count, 1])
    times[list(own.order)] = 1.0  # of a backward that was cut short, it is not known how often
    for index, most in own.counts.items():
        times[index] = most
    for place, index in enumerate(own.order if orders else (), start=1):
        places[index] = place  # the last place of a parameter that came several times
    cut_short[0] = own.cut_short
    return vector


def _reports(vector: Tensor, count: int) -> list[Observation]:
    values = [int(value) for value in vector.tolist()]
    places, cut_short = values[count:-1], bool(values[-1])
    order = sorted((index for index, place in enumerate(places) if place), key=places.__getitem__)
    counts = {index: most for index, most in enumerate(values[:count]) if most}
    return [Observation(tuple(order), counts, cut_short), Observation(tuple(counts), counts, cut_short)]


class ByCounts:
    """A bucket can be launched when each of its gradients has come as often as in the backward that was observed.

    Most come once. One comes twice where a parameter is used in two segments of a re-entrant checkpoint: each segment
    runs a backward of its own, and no hook knows which is the last. Such a bucket waits for the end. So does one with a
    gradient that a later hook of the user's may change, and every bucket while the ranks have agreed on nothing.

    Attributes:
        learned: what the ranks know; ``agree`` and ``forget`` change it.
        guesses: whether, until they know more, each gradient is expected once in a backward. If one comes again on some
            rank, all ranks reduce a second time.
    """

    def __init__(self, observes: bool, may_change: Callable[[Sequence[int]], bool], *, guesses: bool = False) -> None:
        """``observes``: whether there is anything to learn. ``may_change``: whether a later hook of the user's may
        change one of these gradients."""
        self._observes, self._may_change, self.guesses = observes, may_change, guesses
        self.learned = Learned.NOTHING if observes else Learned.ALL
        # How often each parameter comes in a backward, as the ranks agreed. One that is not in it comes once.
        self._counts: dict[int, int] = {}
        self._params: list[list[int]] = []  # of each bucket
        self._repeats: list[bool] = []  # of each bucket, whether one of its parameters comes more than once
        self._expected: list[int] = []  # how often each is to come in a backward, by index; 0 where it is in no bucket
        self._to_come: list[int] = []  # how often each has still to come in this one, by index
        self._of_buckets: list[int] = []  # how many are to come in a backward, of each bucket
        self._missing: list[int] = []  # how many have still to come in this one, of each bucket
        self.drop_observation()

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Use these buckets from now on. No backward is running."""
        self.begin()
        self._params = [[slot.param for slot in bucket.layout.slots] for bucket in buckets]
        of_buckets = [[self._counts.get(index, 1) for index in of_bucket] for of_bucket in self._params]
        self._repeats = [any(count > 1 for count in of_bucket) for of_bucket in of_buckets]
        self._of_buckets = list(map(sum, of_buckets))
        self._expected = [0] * (1 + max(itertools.chain.from_iterable(self._params), default=-1))
        for index in itertools.chain.from_iterable(self._params):
            self._expected[index] = self._counts.get(index, 1)
        self._to_come, self._missing = list(self._expected), list(self._of_buckets)

    def begin(self) -> None:
        """Begin another backward: gradients that have come so far count no more."""
        self._cut_short |= self._to_come != self._expected  # ``backward_ended`` makes them equal: one has raised
        self._to_come, self._missing = list(self._expected), list(self._of_buckets)

    def gradient_ready(self, index: int, number: int) -> bool:
        """Count the gradient of parameter ``index``, of bucket ``number``. Returns whether that made the bucket full.

        Runs for every gradient: it must be quick.
        """
        self._to_come[index] = left = self._to_come[index] - 1
        if self.learned is not Learned.ALL:
            self._order.append(index)
        if left < 0:
            return False
        self._missing[number] = missing = self._missing[number] - 1
        return missing == 0

    def may_launch(self, number: int) -> bool:
        full = self._missing[number] == 0
        known = full and (self.guesses or self.learned is Learned.ALL) and not self._repeats[number]
        return known and not self._may_change(self._params[number])

    def backward_ended(self) -> None:
        if self.learned is not Learned.ALL:
            for index, (expected, left) in enumerate(zip(self._expected, self._to_come, strict=True)):
                if left != expected:
                    self._observed[index] = max(expected - left, self._observed.get(index, 0))
        self._to_come = list(self._expected)

    # -- learning --------------------------------------------------------------------------------------------------

    def observation(self) -> Observation:
        return Observation(tuple(self._order), dict(self._observed), self._cut_short)

    def agree(self, reports: Sequence[Observation], order: Sequence[int]) -> list[int] | None:
        """Take over the reports of the ranks: the largest counts, and rank 0's order in place of ``order``.

        Returns that, if buckets have to be laid out in another order.
        """
        if not any(report.order for report in reports):
            return None  # a step before any backward: there is still nothing to learn from
        for report in reports:
            for index, count in report.counts.items():
                self._counts[index] = max(count, self._counts.get(index, 1))
        whole = not any(report.cut_short for report in reports)
        new = None
        if whole and self.learned is Learned.NOTHING:
            last_first = dict.fromkeys(reversed(reports[0].order))  # where a gradient comes again, the last time counts
            new = list(reversed(last_first)) + [index for index in order if index not in last_first]
        if whole:
            self.learned, self.guesses = Learned.ALL, False
        self.drop_observation()
        return new if new != list(order) else None

    def forget(self, *, order: bool) -> None:
        """Observe the next backwards. ``order``: the layout is to follow them, too."""
        if not self._observes:
            return
        self.learned = Learned.NOTHING if order or self.learned is Learned.NOTHING else Learned.ORDER
        self._counts = {}
        self.guesses &= order  # else the user expects that some come again
        self.drop_observation()

    def drop_observation(self) -> None:
        """Forget what was observed since the ranks last agreed."""
        self._order: list[int] = []
        self._observed: dict[int, int] = {}
        self._cut_short = False


class ByUnits:
    """A bucket holds a unit's parameters, and can be launched when this backward, or the last, is through with them.

    Nothing is counted or observed: a unit that this rank has skipped is reduced all the same, in its turn.
    """

    def __init__(self, schedule: UnitSchedule) -> None:
        self._schedule = schedule
        self._buckets: Sequence[Bucket] = ()

    def use(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets

    def begin(self) -> None:
        pass

    def gradient_ready(self, index: int, number: int) -> bool:
        return False

    def may_launch(self, number: int) -> bool:
        return self._schedule.is_over(self._buckets[number].flat)

    def backward_ended(self) -> None:
        pass


Readiness = ByCounts | ByUnits
"""What the reducer calls: the methods of ``ByUnits``, which ``ByCounts`` documents."""


class GradHooks:
    """The hooks that autograd calls for each parameter, by index: before it adds to a gradient, and after.

    Args:
        before: called with the index, and what is to be added, before autograd adds to a gradient that it precedes.
        ready: called with the index and the parameter when a gradient is there.
    """

    def __init__(self, before: Callable[[int, Any], None], ready: Callable[[int, Tensor], None]) -> None:
        self._before, self._ready = before, ready
        self._nodes: dict[int, torch.autograd.graph.Node] = {}  # the parameters alone do not keep them
        self._post: dict[int, dict[int, object]] = {}  # of each parameter: all hooks by id
        self._own: dict[int, int] = {}  # of each parameter: the id of ours
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @torch.enable_grad()
    def register(self, parameters: Mapping[int, Tensor], precedes: Container[int]) -> None:
        for index, parameter in parameters.items():
            frozen = not parameter.requires_grad
            if frozen:  # it takes no hooks, and may have a gradient of before
                parameter.requires_grad_(True)
            # The hooks go on the node that accumulates, not on the tensor: a tensor's own run under
            # ``torch.autograd.grad``, too, which accumulates nothing. As get_gradient_edge, in a quarter of the time.
            node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self._nodes[index] = node
            handle = parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
            self._post[index], self._own[index] = parameter._post_accumulate_grad_hooks, handle.id
            self._handles.append(handle)
            if index in precedes:
                self._handles.append(node.register_prehook(partial(self._before, index)))
            if frozen:
                parameter.requires_grad_(False)

    def followed_by_users(self, indices: Sequence[int]) -> bool:
        """True if a hook of the user's, which may change the gradient, runs after ours."""
        if max(map(len, map(self._post.__getitem__, indices)), default=0) <= 1:
            return False  # as a rule
        return any(next(reversed(self._post[index])) != self._own[index] for index in indices)

    def accumulates(self, index: int) -> bool:
        """True if the running backward adds to this parameter's gradient, or has done so."""
        return torch._C._will_engine_execute_node(self._nodes[index])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
