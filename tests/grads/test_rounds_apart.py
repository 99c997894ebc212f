"""Two ranks whose machines of rounds are in any two states, whatever both do next, against torch's AdamW.

``test_rounds_cells.py`` walks the tables in ``grads.rounds`` for one rank alone. Here are pairs: the state of rank 0
times the state of rank 1. A pair that a legal program can reach is reached in several ways. After each of them
both ranks do each thing that the law allows. Then both machines have to be where the tables say, and the weights where
AdamW says.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from tables import table
from torch import nn
from training_cases import Planned, impatient, raise_in_backward
from zero_optim.grads import reducer, rounds
from zero_optim.grads.rounds import RoundState

EVENTS = table(rounds.__doc__, "event")
STATES = table(rounds.__doc__, "state")
UNREDUCED, COMPLETE, DIRTY, OPEN = "UNREDUCED", "COMPLETE", "DIRTY", "OPEN"

RANKS = 2
SIZES = (700, 500, 600)
CAP_MB = 0.002  # a bucket for each
LR = 0.01
FACTORS = (1.0, -0.5, 2.0, 0.75, -1.5, 0.25, 3.0)  # of gradients, in turn

# How far the backward of a rank comes: there is none; it raises before its first gradient, half-way, after its last
# one; or it does not raise.
NONE, FIRST, HALF, LAST, WHOLE = -1, 0, 1, 3, 4


@dataclass(frozen=True)
class Way:
    """How two ranks come to be in two states. Of each call: its name, and how far each rank's backward comes."""

    states: tuple[str, str]
    calls: tuple[tuple[str, int, int], ...]

    @property
    def left_out(self) -> int | None:
        """The rank that the last backward has not reached, where it has reached the other."""
        name, *far = self.calls[-1] if self.calls else ("", NONE, NONE)
        reached = [of_rank > FIRST for of_rank in far]
        return reached.index(False) if name == "backward" and len(set(reached)) == RANKS else None

    @property
    def without_data(self) -> bool:
        """Whether it had no backward there. Else that has raised before its first gradient."""
        return self.left_out is not None and self.calls[-1][1 + self.left_out] == NONE

    def mirrored(self) -> Way:
        return Way((self.states[1], self.states[0]), tuple((name, b, a) for name, a, b in self.calls))


BOTH, ZERO, STEP, CLIP = (
    ("backward", WHOLE, WHOLE),
    ("zero_grad", NONE, NONE),
    ("step", NONE, NONE),
    ("clip_grad_norm_", NONE, NONE),
)
_WAYS = [
    Way((UNREDUCED, UNREDUCED), ()),
    Way((UNREDUCED, UNREDUCED), (BOTH, ZERO)),
    Way((UNREDUCED, UNREDUCED), (BOTH, STEP)),  # its gradients stay
    Way((UNREDUCED, UNREDUCED), (("no_sync", WHOLE, NONE),)),
    Way((UNREDUCED, UNREDUCED), (("no_sync", HALF, WHOLE),)),
    Way((UNREDUCED, UNREDUCED), (("backward", FIRST, FIRST),)),
    Way((COMPLETE, COMPLETE), (BOTH,)),
    Way((COMPLETE, COMPLETE), (BOTH, BOTH)),
    Way((COMPLETE, COMPLETE), (("backward", HALF, WHOLE), BOTH)),
    Way((COMPLETE, COMPLETE), (CLIP,)),
    Way((COMPLETE, COMPLETE), (("no_sync", NONE, WHOLE), CLIP)),
    Way((DIRTY, DIRTY), (BOTH, ("no_sync", NONE, NONE))),
    Way((DIRTY, DIRTY), (BOTH, ("no_sync", WHOLE, NONE))),
    Way((DIRTY, DIRTY), (("backward", WHOLE, HALF), ("no_sync", NONE, HALF))),
    Way((DIRTY, DIRTY), (CLIP, ("no_sync", NONE, WHOLE))),
    Way((OPEN, OPEN), (("backward", HALF, HALF),)),
    Way((OPEN, OPEN), (("backward", HALF, LAST),)),
    Way((OPEN, OPEN), (BOTH, ("no_sync", WHOLE, NONE), ("backward", LAST, HALF))),
    Way((COMPLETE, OPEN), (("backward", WHOLE, HALF),)),
    Way((COMPLETE, OPEN), (("backward", WHOLE, LAST),)),
    Way((COMPLETE, OPEN), (BOTH, ("no_sync", NONE, WHOLE), ("backward", WHOLE, HALF))),
    Way((UNREDUCED, COMPLETE), (("backward", NONE, WHOLE),)),
    Way((UNREDUCED, COMPLETE), (("backward", FIRST, WHOLE),)),
    Way((UNREDUCED, COMPLETE), (("no_sync", WHOLE, NONE), ("backward", FIRST, WHOLE))),
    Way((UNREDUCED, OPEN), (("backward", NONE, HALF),)),
    Way((UNREDUCED, OPEN), (("backward", FIRST, LAST),)),
]
WAYS = [*_WAYS, *(way.mirrored() for way in _WAYS if len(set(way.states)) > 1)]

# With ``overlap_grad_reduce=False`` at stage 1, only ``step`` and ``clip_grad_norm_`` launch rounds: no pair is apart.
WAYS_WITHOUT_OVERLAP = [
    Way((UNREDUCED, UNREDUCED), ()),
    Way((UNREDUCED, UNREDUCED), (BOTH,)),
    Way((UNREDUCED, UNREDUCED), (("backward", HALF, WHOLE),)),
    Way((UNREDUCED, UNREDUCED), (("backward", FIRST, WHOLE),)),
    Way((UNREDUCED, UNREDUCED), (("backward", WHOLE, NONE),)),
    Way((UNREDUCED, UNREDUCED), (BOTH, ("no_sync", NONE, HALF))),
    Way((COMPLETE, COMPLETE), (BOTH, CLIP)),
    Way((DIRTY, DIRTY), (BOTH, CLIP, BOTH)),
    Way((DIRTY, DIRTY), (BOTH, CLIP, ("backward", HALF, WHOLE))),
    Way((DIRTY, DIRTY), (("backward", NONE, WHOLE), CLIP, ("no_sync", NONE, NONE))),
]

PAIRS = set(itertools.product([state.name for state in RoundState], repeat=RANKS))
ONE_OF_SEVERAL = "One of several synchronised backwards may not reach one rank alone."
BLOCK_AFTER_ONE = "No no_sync block may come after a backward that has reached one rank alone."
WITHIN_A_CALL = "It begins and ends within one call."
UNREACHABLE = {
    (DIRTY, COMPLETE): ONE_OF_SEVERAL,
    (COMPLETE, DIRTY): ONE_OF_SEVERAL,
    (DIRTY, OPEN): ONE_OF_SEVERAL,
    (OPEN, DIRTY): ONE_OF_SEVERAL,
    (DIRTY, UNREDUCED): BLOCK_AFTER_ONE,
    (UNREDUCED, DIRTY): BLOCK_AFTER_ONE,
    **{pair: WITHIN_A_CALL for pair in PAIRS if "COMPLETING" in pair},
}

NEXT = (
    "step",
    "zero_grad",
    "zero_grad in place",
    "no_sync",
    "no_sync, empty",
    "clip_grad_norm_",
    "state_dict",
    "load_state_dict",
    "full_state_dict",
    "load_full_state_dict",
    "observe",
    "close",
    "backward",
    "backward that raises",
)


def forbidden(way: Way, then: str, stage: int) -> str | None:
    """Why the law does not let this follow; None: it does."""
    if way.left_out is None or then in ("step", "clip_grad_norm_", "state_dict"):
        return None
    if then.startswith("no_sync"):
        return BLOCK_AFTER_ONE
    if then.startswith("backward"):
        return ONE_OF_SEVERAL
    if then.startswith("zero_grad") and way.without_data:
        return "It is step that launches the round of a rank without data."
    if then.endswith("full_state_dict"):
        return "Its gathers would meet the round that the rank left out has not launched."
    return "At stage 0 the other rank waits in its backward for the average." if stage == 0 else None


def cases(stage: int, overlap: bool = True) -> Iterator[tuple[Way, str, bool]]:
    """A way, what follows, and whether the backward is observed. Else buckets leave while it runs.

    Of each pair and what follows, the first way is gone at every stage, and each of the others at one.
    """
    if not overlap:
        for way, then in itertools.product(WAYS_WITHOUT_OVERLAP, NEXT):
            if forbidden(way, then, stage) is None:
                yield way, then, False
        return
    gone: set[tuple[tuple[str, str], str]] = set()
    for (number, way), (place, then) in itertools.product(enumerate(WAYS), enumerate(NEXT)):
        legal = [other for other in (0, 1, 2) if forbidden(way, then, other) is None]
        first = (way.states, then) not in gone
        if stage in legal and (first or legal[(number + place) % len(legal)] == stage):
            gone.add((way.states, then))
            yield way, then, not first and number % 2 == 0


class Machine:
    """Where the tables say that a rank's machine is."""

    def __init__(self, overlap: bool) -> None:
        self.state, self.launched, self.overlap = UNREDUCED, 0, overlap

    def tell(self, event: str) -> None:
        self.state = EVENTS[event, self.state]
        assert self.state != "error"
        self.launched = (
            self.launched + 1 if event == "completed" else 0 if event in ("step", "clear") else self.launched
        )

    def complete(self) -> None:
        self.tell("complete")
        self.tell("completed")

    def settle(self) -> None:
        """What every call begins with that all ranks make."""
        if self.state == OPEN:
            self.complete()

    def reduce(self) -> None:
        """What ``step`` and ``clip_grad_norm_`` launch."""
        self.settle()
        for _ in range(int(STATES[self.state, "owed"])):
            self.tell("begin")
            self.complete()

    def backward(self, far: int) -> None:
        if far > FIRST:
            self.settle()
            self.tell("begin" if self.overlap else "local")
        if far == WHOLE and self.overlap:
            self.complete()


class Player:
    """One rank, and beside it what both should be: their machines, their gradients added up, and AdamW."""

    def __init__(self, rank: int, stage: int, overlap: bool = True) -> None:
        self.rank, self.stage, self.overlap = rank, stage, overlap
        self.params = [nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES]
        self.theirs = [parameter.detach().clone() for parameter in self.params]
        self.calls = itertools.count()
        self.renew()

    def renew(self) -> None:
        """A new optimizer for the same parameters."""
        self.opt = zero_optim.ShardedAdamW(
            self.params, lr=LR, stage=self.stage, bucket_cap_mb=CAP_MB, overlap_grad_reduce=self.overlap
        )
        made = reducer.open_reducers()[-1]
        self.found = made.rounds
        self.adam = torch.optim.AdamW(self.theirs, lr=LR)
        self.machines = [Machine(self.overlap) for _ in range(RANKS)]
        self.sums: list[dict[int, float]] = [{} for _ in range(RANKS)]
        self.coefficient = 1.0
        for name, *far in (BOTH, STEP, ZERO):  # what it observes is known from here on
            self.call(name, *far)

    # -- the calls ---------------------------------------------------------------------------------------------------

    def call(self, name: str, *far: int) -> None:
        getattr(self, name)(*far)

    def _one_backward(self, far: Sequence[int]) -> None:
        """Gradient i is a factor times i + 1, and the last comes first; the same is added up for both ranks."""
        number, self.coefficient = next(self.calls), 1.0
        factors = [FACTORS[(number + 3 * rank) % len(FACTORS)] for rank in range(RANKS)]
        for rank, come in enumerate(far):
            for index in range(max(0, len(SIZES) - max(0, come)), len(SIZES)):
                self.sums[rank][index] = self.sums[rank].get(index, 0.0) + factors[rank] * (index + 1)
        if far[self.rank] == NONE:
            return
        total = torch.ones((), requires_grad=True)
        for index, parameter in enumerate(self.params):
            if len(SIZES) - index == far[self.rank]:
                total = raise_in_backward(total)
            total = total + (parameter * (factors[self.rank] * (index + 1))).sum()
        with suppress(Planned):
            (raise_in_backward(total) if far[self.rank] == FIRST else total).backward()

    def backward(self, *far: int) -> None:
        self._one_backward(far)
        for machine, come in zip(self.machines, far, strict=True):
            machine.backward(come)

    def no_sync(self, *far: int) -> None:
        with self.opt.no_sync():
            self._one_backward(far)
        for machine in self.machines:
            machine.settle()
            machine.tell("local")

    def step(self, *_: int) -> None:
        self.opt.step()
        for index, parameter in enumerate(self.theirs):
            average = self.average(index)
            parameter.grad = None if average is None else torch.full_like(parameter, average * self.coefficient)
        self.adam.step()
        for machine in self.machines:
            machine.reduce()
            machine.tell("step")

    def zero_grad(self, *_: int, set_to_none: bool = True) -> None:
        self.opt.zero_grad(set_to_none)
        present = {index for of_rank in self.sums for index in of_rank}
        self.sums = [{} if set_to_none else dict.fromkeys(present, 0.0) for _ in range(RANKS)]
        self.coefficient = 1.0
        for machine in self.machines:
            machine.settle()
            machine.tell("clear")

    def clip_grad_norm_(self, *_: int, max_norm: float = 1e9) -> None:
        norm = float(self.opt.clip_grad_norm_(max_norm))
        expected = sum(size * (self.average(index) or 0.0) ** 2 for index, size in enumerate(SIZES)) ** 0.5
        assert norm == pytest.approx(expected, rel=1e-5), f"the norm is {norm}, not {expected}"
        self.coefficient = min(1.0, max_norm / (expected + 1e-6))
        for machine in self.machines:
            machine.reduce()

    def _next(self, then: str) -> None:
        if then in ("step", "zero_grad"):
            self.call(then)
        elif then == "zero_grad in place":
            self.zero_grad(set_to_none=False)
        elif then == "no_sync":
            self.no_sync(NONE, WHOLE)
        elif then == "no_sync, empty":
            self.no_sync(NONE, NONE)
        elif then == "clip_grad_norm_":
            self.clip_grad_norm_(max_norm=1.0)
        elif then == "backward":
            self.backward(WHOLE, WHOLE)
        elif then == "backward that raises":
            self.backward(HALF, WHOLE)
        elif then == "state_dict":
            self.opt.state_dict()  # nobody hears of it
        else:
            if then == "load_state_dict":
                self.opt.load_state_dict(self.opt.state_dict())
            elif then == "full_state_dict":
                self.check_full_state(zero_optim.full_state_dict(self.opt))
            elif then == "load_full_state_dict":
                zero_optim.load_full_state_dict(self.opt, zero_optim.full_state_dict(self.opt) or None)
            else:
                getattr(self.opt, then)()
            for machine in self.machines:
                machine.settle()

    # -- what has to be ----------------------------------------------------------------------------------------------

    def average(self, index: int) -> float | None:
        values = [of_rank.get(index) for of_rank in self.sums]
        return None if values == [None] * RANKS else sum(value or 0.0 for value in values) / RANKS

    def check_machine(self, where: str) -> None:
        found, expected = self.found, self.machines[self.rank]
        assert found.state.name == expected.state, f"{where}: {found.state.name}, the table says {expected.state}"
        assert found.launched == expected.launched, f"{where}: {found.launched} rounds, not {expected.launched}"

    def check_weights(self, where: str) -> None:
        difference = max(float((a.detach() - b).abs().max()) for a, b in zip(self.params, self.theirs, strict=True))
        assert difference < 1e-5, f"{where}: the weights are off by {difference}"
        for ours, theirs in zip(self.params, self.theirs, strict=True):
            theirs.copy_(ours.detach())  # so that rounding does not add up over the cases

    def check_full_state(self, state: dict[str, Any] | None) -> None:
        for index, parameter in enumerate(self.theirs if self.rank == 0 else []):
            of_parameter = state["state"].get(index, {}) if state is not None else {}
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(of_parameter[name], self.adam.state[parameter][name])

    def own_collective(self) -> None:
        value = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(value)
        assert float(value) == sum(range(1, RANKS + 1))

    def play(self, way: Way, then: str, *, observed: bool) -> None:
        """From zeroed gradients to zeroed gradients."""
        if observed:
            self.opt.observe()
        for call in way.calls:
            self.call(*call)
        assert tuple(machine.state for machine in self.machines) == way.states, "the way leads elsewhere"
        self.check_machine("on the way")
        if self.stage > 0:  # there a rank may be waiting in its backward for the other
            self.own_collective()
        self._next(then)
        self.check_machine(f"after {then}")
        if then == "close":
            for parameter in self.params:
                parameter.grad = None
            self.renew()
        self.step()
        self.check_machine("after step")
        self.check_weights("after step")
        self.zero_grad()
        self.check_machine("after zero_grad")


def _play_all(rank: int, world_size: int, stage: int, overlap: bool) -> int:
    """How many cases there were, one after another with one optimizer."""
    count = 0
    with warnings.catch_warnings(), impatient(0.01):  # for a rank that has raised it would be in vain
        warnings.simplefilter("ignore")
        player = Player(rank, stage, overlap)
        for way, then, observed in cases(stage, overlap):
            try:
                player.play(way, then, observed=observed)
            except Exception as error:
                raise AssertionError(f"{way.states} by {way.calls}, then {then}; observed: {observed}") from error
            count += 1
    player.opt.close()
    return count


def test_every_pair_is_reached_or_cannot_be():
    reached = {way.states for way in WAYS}
    assert reached | UNREACHABLE.keys() == PAIRS
    assert not reached & UNREACHABLE.keys()


def test_all_that_is_legal_is_played():
    """Over the stages: every way, and what follows it."""
    played = {(way, then) for stage in (0, 1, 2) for way, then, _ in cases(stage)}
    assert played == {case for case in itertools.product(WAYS, NEXT) if forbidden(*case, 2) is None}
    for stage in (0, 1, 2):
        legal = {(way.states, then) for way, then in itertools.product(WAYS, NEXT) if not forbidden(way, then, stage)}
        assert {(way.states, then) for way, then, _ in cases(stage)} == legal


@pytest.mark.parametrize(("stage", "overlap"), [(0, True), (1, True), (2, True), (1, False)])
def test_two_ranks(stage: int, overlap: bool):
    count = len(list(cases(stage, overlap)))
    assert run_ranks(RANKS, _play_all, stage, overlap, timeout=120) == [count] * RANKS


# -- within a no_sync block --------------------------------------------------------------------------------------------

IN_A_BLOCK = (
    "step",
    "clip_grad_norm_",
    "zero_grad",
    "zero_grad in place",
    "state_dict",
    "load_state_dict",
    "full_state_dict",
    "load_full_state_dict",
    "observe",
    "no_sync",
)


def _play_in_a_block(rank: int, world_size: int, stage: int) -> None:
    """Rank 1 alone has a gradient in the block, and both make a call before it ends."""
    player = Player(rank, stage)
    for then in IN_A_BLOCK:
        player.call(*BOTH)
        with player.opt.no_sync():
            player._one_backward((NONE, WHOLE))
            player.machines[1].tell("local")
            player.check_machine(f"before {then}")
            for machine in player.machines if then in ("step", "clip_grad_norm_") else ():
                machine.tell("local")  # the block counts on both ranks before it ends
            player._next(then)
            player.check_machine(f"after {then}")
        player.coefficient = 1.0  # the end of the block has discarded it
        for machine in player.machines:
            machine.tell("local")
        player.check_machine(f"after a block with {then}")
        player.step()
        player.check_weights(f"after a block with {then}")
        player.zero_grad()
    player.opt.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_within_a_no_sync_block_one_rank_is_dirty_before_the_other(stage: int):
    run_ranks(RANKS, _play_in_a_block, stage)
