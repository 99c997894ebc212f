"""Backwards that raise, on one rank or on all, anywhere, and whatever a program does next: in the words of the face.

Each program trains a step, runs a backward that raises, does one more thing, and trains two steps more. The oracle of
``fuzz`` adds up what each rank's gradients were before the exception, as torch does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import zero_optim
from cells import pairs
from fuzz.execute import Face
from fuzz.law import why_not
from fuzz.program import (
    AllReduce,
    Backward,
    Boom,
    Clip,
    Group,
    Load,
    LoadFull,
    ModuleZero,
    Observe,
    Op,
    Optim,
    Program,
    Renew,
    Save,
    SaveFull,
    Step,
    Use,
    Zero,
)
from harness import run_ranks
from programs.family import See
from programs.search import check_all
from training_cases import impatient

SIZES = (700, 300, 500, 400, 600, 200)
CAP_MB = 0.002  # several buckets
RANKS = 2


class Raised(Face):
    """Where a rank waits for one that has raised, all patience is in vain."""

    def run(self, program: Program, rank: int, folder: str, see: See) -> None:
        with impatient():
            super().run(program, rank, folder, see)

    def why_not(self, program: Program) -> str | None:
        reason = super().why_not(program)
        return None if reason in NARROWER else reason


RAISED = Raised()
FOLLOWED_BY = (
    "zero_grad",
    "zero",
    "module_zero_grad",
    "module_zero",
    "step",
    "backward",
    "no_sync",
    "clip",
    "state_dict",
    "full_state_dict",
    "load_full_state_dict",
    "observe",
    "close",
)


def program(stage: int, optimizers: int, raising: Sequence[int], after: int, then: str) -> Program:
    """``raising``: ranks; ``after``: how many gradients come before; ``then``: what follows. Every optimizer has every
    ``optimizers``-th parameter, so that their gradients come in turns."""
    every = range(optimizers)
    shapes = [tuple((size,) for size in SIZES[o::optimizers]) for o in every]
    optims = tuple(Optim(s, stage, (Group(tuple(range(len(s)))),), bucket_cap_mb=CAP_MB) for s in shapes)

    def chain(factor: float) -> tuple[Use, ...]:
        """The last parameter's gradient comes first."""
        return tuple(Use(i % optimizers, i // optimizers, factor * (i + 1) / 8) for i in range(len(SIZES)))

    def train(*factors: float) -> list[Op]:
        return [Backward(tuple(map(chain, factors))), AllReduce(1.0)]

    def raises(rank: int, factor: float) -> tuple[Use | Boom, ...]:
        links, place = chain(factor), len(SIZES) - after
        return (*links[:place], Boom(), *links[place:]) if rank in raising else links

    clear = [Zero(o) for o in every]
    step = [*(Step(o) for o in every), *clear]
    follows: dict[str, list[Op]] = {
        "zero_grad": clear,
        "zero": [*(Zero(o, to_none=False) for o in every), *step],
        "module_zero_grad": [ModuleZero(o) for o in every],
        "module_zero": [*(ModuleZero(o, to_none=False) for o in every), *step],
        "step": step,
        "backward": [*train(0.5, 0.25), *step],
        "no_sync": [Backward((None, chain(0.5)), no_sync=tuple(every)), *step],
        "clip": [*(Clip(o, 1e9) for o in every), *step],
        "state_dict": [*(op for o in every for op in (Save(o), Load(o))), *clear],
        "full_state_dict": [*(SaveFull(o) for o in every), *step],
        "load_full_state_dict": [*(op for o in every for op in (SaveFull(o), LoadFull(o))), *step],
        "observe": [*(Observe(o) for o in every), *step],
        "close": [Renew(o, stage) for o in every],
    }
    interrupted: list[Op] = [Backward((raises(0, 2.0), raises(1, -1.0)))]
    if stage > 0:  # there the other rank waits in backward, for averages
        interrupted.append(AllReduce(1.0))
    ops = [*train(1.0, 3.0), *step, *interrupted, *follows[then], *train(1.5, 0.5), *step, *train(-1.0, 2.0), *step]
    return Program(RANKS, optims, tuple(ops))


NARROWER = {
    "gradients may be dropped": "a state dict is loaded while there are gradients, and the next call drops them",
    "a rank may be waiting for another optimizer": "at stage 0 the one that was reached last is not called first",
    "a rank may be waiting, at stage 0": "a no_sync block is one of all of them at once",
}
"""What the law forbids to random programs, and these do nevertheless."""


def _check(programs: Sequence[Program]) -> None:
    assert {RAISED.why_not(made) for made in programs} == {None}
    check_all(RAISED, programs, "interrupted", most=2)


NUMBERS = (1, 2, 3)  # of optimizers


@pytest.mark.parametrize(("stage", "alone", "at_the_end"), pairs([0, 1, 2], [True, False], [False, True]))
def test_after_some_gradients(stage: int, alone: bool, at_the_end: bool):
    """Between gradients, of every optimizer; and after the last one.

    The rank that raises ``alone`` and the number of optimizers take turns: at each stage every rank meets every number,
    and everything that follows. Whether the gradients are all there is a matter of one bucket, and of no other
    optimizer's.
    """
    programs = []
    for turn, then in enumerate(FOLLOWED_BY):
        turn += stage + at_the_end
        raising = (turn % RANKS,) if alone else (0, 1)
        optimizers = NUMBERS[turn % len(NUMBERS)]
        after = len(SIZES) if at_the_end else len(SIZES) - 3 + optimizers - 1
        programs.append(program(stage, optimizers, raising, after, then))
    _check(programs)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_before_the_first_gradient_on_all_ranks(stage: int):
    """Nothing was launched anywhere, so what follows is the same for one optimizer and for two: they take turns."""
    _check([program(stage, 1 + (turn + stage) % 2, (0, 1), 0, then) for turn, then in enumerate(FOLLOWED_BY)])


@pytest.mark.parametrize(
    ("stage", "optimizers", "then"),
    [(0, 1, "step"), *itertools.product((1, 2), (1, 2), ("step", "zero_grad"))],
)
def test_before_the_first_gradient_on_one_rank(stage: int, optimizers: int, then: str):
    """It leaves no trace there: ``step``, or ``zero_grad`` after an earlier one, settles it. At stage 0 the other rank
    waits in backward, for the averages of each optimizer."""
    _check([program(stage, optimizers, (0,), 0, then)])


def _parted(rank: int, world_size: int, stage: int, then: str) -> str:
    """A program that is wrong: the documentation asks for a zero_grad that is missing, or does not help at stage 0."""
    try:
        RAISED.run(program(stage, 1, (0,), 0, then), rank, "", lambda *seen: None)
    except zero_optim.ZeroOptimError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("stage", "then"), [(0, "zero_grad"), (1, "backward"), (2, "backward"), (2, "module_zero_grad")]
)
def test_ranks_that_wait_for_each_other_in_vain_are_told_within_seconds(stage: int, then: str):
    """Long before the group's time-out, which would have other words. The ranks leave when it is over."""
    assert why_not(program(stage, 1, (0,), 0, then)) is not None
    for text in run_ranks(RANKS, _parted, stage, then, collective_timeout=5):
        assert text.startswith("RankMismatchError: the ranks wait for each other"), text
        fewer = 1 if stage == 0 else 2  # since the optimizer was made
        assert f"rank 0 has reduced {fewer}, rank 1 has reduced {fewer + 1}" in text
        assert "opt.zero_grad()" in text
