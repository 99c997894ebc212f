"""Two ranks whose machines of rounds are in any two states, whatever both do next, against torch's AdamW.

``test_rounds_cells.py`` walks the tables of ``RoundState`` for one rank alone. Here are pairs: the state of rank 0
times the state of rank 1. A pair that a legal program can reach is reached in several ways. After each of them
both ranks do each thing that the law allows. Then both machines have to be where the tables say, and the weights where
AdamW says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from cells import slow
from random_programs.run import Program, check, verdict
from tables import table
from training_cases import impatient
from zero_optim import ShardedOptimizer
from zero_optim.grads.rounds import RoundState

EVENTS = table(RoundState.__doc__, "event")
STATES = table(RoundState.__doc__, "state")
UNREDUCED, COMPLETE, DIRTY, OPEN = "UNREDUCED", "COMPLETE", "DIRTY", "OPEN"

RANKS = 2
SIZES = (700, 500, 600)
CAP_MB = 0.002  # a bucket for each
FACTORS = (1.0, -0.5, 2.0, 0.75, -1.5, 0.25, 3.0)  # of gradients, in turn

# How far the backward of a rank comes: there is none; it raises before its first gradient, half-way, after its last
# one; or it does not raise.
NONE, FIRST, HALF, LAST, WHOLE = -1, 0, 1, 3, 4


Call = tuple[Any, ...]  # its name, and how far each rank's backward comes, where it is one


@dataclass(frozen=True)
class Way:
    """How two ranks come to be in two states."""

    states: tuple[str, str]
    calls: tuple[Call, ...]

    @property
    def left_out(self) -> int | None:
        """The rank that the last backward has not reached, where it has reached the other."""
        name, *far = self.calls[-1] if self.calls else ("",)
        reached = [of_rank > FIRST for of_rank in far]
        return reached.index(False) if name == "backward" and len(set(reached)) == RANKS else None

    @property
    def without_data(self) -> bool:
        """Whether it had no backward there. Else that has raised before its first gradient."""
        return self.left_out is not None and self.calls[-1][1 + self.left_out] == NONE

    def mirrored(self) -> Way:
        return Way((self.states[1], self.states[0]), tuple((name, *reversed(far)) for name, *far in self.calls))


BOTH, ZERO, STEP, NORM = ("backward", WHOLE, WHOLE), ("zero_grad",), ("step",), ("norm",)
CALLS = {  # what they are in the text of a program
    "step": "step(a)",
    "zero_grad": "zero(a)",
    "zero_grad in place": "zero(a, to_none=False)",
    "norm": "clip(a, 1e9)",
    "clip_grad_norm_": "clip(a, 1.0)",
    "state_dict": "saved(a)",
    "load_state_dict": "a.opt.load_state_dict(saved(a))",
    "full_state_dict": "full(a)",
    "load_full_state_dict": "load_full(a, full(a))",
    "observe": "a.opt.observe()",
    "all_reduce": "all_reduce(1.0)",
    "enter": "inside = a.opt.no_sync(); inside.__enter__()",
    "leave": "inside.__exit__(None, None, None)",
}
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
    Way((COMPLETE, COMPLETE), (NORM,)),
    Way((COMPLETE, COMPLETE), (("no_sync", NONE, WHOLE), NORM)),
    Way((DIRTY, DIRTY), (BOTH, ("no_sync", NONE, NONE))),
    Way((DIRTY, DIRTY), (BOTH, ("no_sync", WHOLE, NONE))),
    Way((DIRTY, DIRTY), (("backward", WHOLE, HALF), ("no_sync", NONE, HALF))),
    Way((DIRTY, DIRTY), (NORM, ("no_sync", NONE, WHOLE))),
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
    Way((COMPLETE, COMPLETE), (BOTH, NORM)),
    Way((DIRTY, DIRTY), (BOTH, NORM, BOTH)),
    Way((DIRTY, DIRTY), (BOTH, NORM, ("backward", HALF, WHOLE))),
    Way((DIRTY, DIRTY), (("backward", NONE, WHOLE), NORM, ("no_sync", NONE, NONE))),
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

NEXT: tuple[Call, ...] = (
    *((name,) for name in CALLS if name not in ("norm", "all_reduce", "enter", "leave")),
    ("close",),
    ("no_sync", NONE, WHOLE),
    ("no_sync", NONE, NONE),
    BOTH,
    ("backward", HALF, WHOLE),
)


def forbidden(way: Way, then: Call, stage: int) -> str | None:
    """Why the law does not let this follow; None: it does."""
    name = then[0]
    if way.left_out is None or name in ("step", "clip_grad_norm_", "state_dict"):
        return None
    if name == "no_sync":
        return BLOCK_AFTER_ONE
    if name == "backward":
        return ONE_OF_SEVERAL
    if name.startswith("zero_grad") and way.without_data:
        return "It is step that launches the round of a rank without data."
    if name.endswith("full_state_dict"):
        return "Its gathers would meet the round that the rank left out has not launched."
    return "At stage 0 the other rank waits in its backward for the average." if stage == 0 else None


def cases(stage: int, overlap: bool = True) -> Iterator[tuple[Way, Call, bool]]:
    """A way, what follows, and whether the backward is observed. Else buckets leave while it runs.

    Of each pair and what follows, the first way is gone at every stage, and each of the others at one.
    """
    if not overlap:
        for way, then in itertools.product(WAYS_WITHOUT_OVERLAP, NEXT):
            if forbidden(way, then, stage) is None:
                yield way, then, False
        return
    gone: set[tuple[tuple[str, str], Call]] = set()
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

    def backward(self, come: int) -> None:
        if come > FIRST:
            self.settle()
            self.tell("begin" if self.overlap else "local")
        if come == WHOLE and self.overlap:
            self.complete()


class Machines:
    """Those of all ranks, along the calls of a program."""

    def __init__(self, overlap: bool) -> None:
        self.overlap, self.in_block = overlap, False
        self.renew()

    def renew(self) -> None:
        self.ranks = [Machine(self.overlap) for _ in range(RANKS)]

    def tell(self, event: str) -> None:
        for machine in self.ranks:
            machine.tell(event)

    def settle(self) -> None:
        for machine in self.ranks:
            machine.settle()

    def follow(self, name: str, *far: int) -> None:
        if name == "no_sync":
            self.settle()
            self.tell("local")
        elif name == "backward":
            self.backward(far)
        elif name in ("step", "norm", "clip_grad_norm_"):
            if self.in_block:  # it counts on all ranks before it ends
                self.tell("local")
            for machine in self.ranks:
                machine.reduce()
            if name == "step":
                self.tell("step")
        elif name.startswith("zero_grad"):
            self.settle()
            self.tell("clear")
        elif name in ("enter", "leave"):
            self.in_block = name == "enter"
            self.settle()
            if not self.in_block:
                self.tell("local")
        elif name == "close":
            self.renew()
        elif name not in ("state_dict", "all_reduce"):
            self.settle()

    def backward(self, far: Sequence[int]) -> None:
        for machine, come in zip(self.ranks, far, strict=True):
            if not self.in_block:
                machine.backward(come)
            elif come > FIRST:
                machine.tell("local")


def apart(made: Program, rank: int) -> str | None:
    """The verdict, and after every call where the machine of this rank is. For a rank that has raised all patience is
    in vain."""

    def at(a: Any, state: str, launched: int, *call: Any) -> None:
        if not isinstance(a.opt, ShardedOptimizer):  # plain torch
            return
        now = a.opt.engine.reducer.rounds
        found = now.state.name, now.launched
        assert found == (state, launched), f"rank {rank}, after {call}: {found}, and the table says {(state, launched)}"

    with impatient(0.01):
        return verdict(made, rank, {"at": at})


# -- the programs ------------------------------------------------------------------------------------------------------


def chain(come: int, factor: float) -> str:
    """Gradient i is ``factor`` times i + 1, and the last comes first."""
    if come == NONE:
        return "None"
    links = [f"use(a, {p}, {factor * (p + 1) / 4})" for p in range(len(SIZES))]
    place = len(SIZES) - come
    return f"[{', '.join(links if come == WHOLE else [*links[:place], 'boom', *links[place:]])}]"


class Writer:
    """Writes calls as text, with where each rank's machine must be then. Backwards one after another have other
    gradients."""

    def __init__(self, stage: int, overlap: bool = True) -> None:
        self.stage, self.factors, self.machines = stage, itertools.cycle(FACTORS), Machines(overlap)
        self.lines = [
            f"a = optimizer({[(size,) for size in SIZES]}, stage={stage}, bucket_cap_mb={CAP_MB},"
            f" overlap_grad_reduce={overlap})"
        ]

    def call(self, *calls: Call) -> None:
        for name, *far in calls:
            if name in ("backward", "no_sync"):
                ranks = ", ".join(chain(come, next(self.factors)) for come in far)
                self.lines.append(f"back({ranks}{', no_sync=[a]' if name == 'no_sync' else ''})")
            elif name == "close":
                self.lines.append(f"renew(a, {self.stage})")
            else:
                self.lines.append(CALLS[name])
            self.machines.follow(name, *far)
            places = [(machine.state, machine.launched) for machine in self.machines.ranks]
            self.lines.append(f"at(a, *{places}[rank], {', '.join(map(repr, (name, *far)))})")
            if name == "close":
                self.loop()

    def loop(self) -> None:
        """What a new optimizer observes is known from here on."""
        self.call(BOTH, STEP, ZERO)

    def case(self, way: Way, then: Call, observed: bool) -> None:
        """From zeroed gradients to zeroed gradients."""
        before = [("observe",)] if observed else []
        between = (
            [("all_reduce",)] if self.stage > 0 else []
        )  # at stage 0 a rank may wait in its backward for the other
        self.call(*before, *way.calls, *between, then, STEP, ZERO)

    def in_a_block(self, then: Call) -> None:
        """Rank 1 alone has a gradient in the block, and both make a call before it ends."""
        self.call(BOTH, ("enter",), ("backward", NONE, WHOLE), then, ("leave",), STEP, ZERO)

    def program(self) -> Program:
        return Program(RANKS, "\n".join([*self.lines, ""]))


def programs(stage: int, overlap: bool, first: bool) -> Iterator[Program]:
    """One for each way, with all that follows it. ``first``: of each pair of states the first way; else the others."""
    reached = set()
    for way, of_way in itertools.groupby(cases(stage, overlap), lambda case: case[0]):
        is_first = way.states not in reached
        reached.add(way.states)
        if is_first is first:
            writer = Writer(stage, overlap)
            writer.loop()
            for case in of_way:
                writer.case(*case)
            yield writer.program()


# -- the tests ---------------------------------------------------------------------------------------------------------


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


def test_every_way_leads_to_its_states():
    for way in (*WAYS, *WAYS_WITHOUT_OVERLAP):
        machines = Machines(overlap=way in WAYS)
        for call in way.calls:
            machines.follow(*call)
        assert tuple(machine.state for machine in machines.ranks) == way.states, way.calls


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize(("stage", "overlap"), [(0, True), (1, True), (2, True), (1, False)])
def test_two_ranks(stage: int, overlap: bool, first: bool):
    check(*programs(stage, overlap, first), judge=apart)


IN_A_BLOCK = [then for then in NEXT if then[0] not in ("close", "backward") and then != ("no_sync", NONE, NONE)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_within_a_no_sync_block_one_rank_is_dirty_before_the_other(stage: int):
    writer = Writer(stage)
    writer.loop()
    for then in IN_A_BLOCK:
        writer.in_a_block(then)
    check(writer.program(), judge=apart)
