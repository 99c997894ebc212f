"""Backwards that raise, on one rank or on all, anywhere, and whatever a program does next, against plain torch.

Each program trains a step, runs a backward that raises, does one more thing, and trains two steps more. What counts is
each rank's gradients from before the exception, as with torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import zero_optim
from cells import pairs
from harness import run_ranks
from random_programs.run import Program, check, play, verdict
from training_cases import impatient

SIZES = (700, 300, 500, 400, 600, 200)
CAP_MB = 0.002  # several buckets
RANKS = 2
FOLLOWED_BY = {  # by name, what follows; each call is made for each optimizer ``o``
    "zero_grad": "zero(*every_o)",
    "zero": "zero(*every_o, to_none=False); STEP",
    "module_zero_grad": "module_zero(*every_o)",
    "module_zero": "module_zero(*every_o, to_none=False); STEP",
    "step": "STEP",
    "backward": "back(chain(0.5), chain(0.25)); all_reduce(1.0); STEP",
    "no_sync": "back(None, chain(0.5), no_sync=every_o); STEP",
    "clip": "[clip(o, 1e9) for o in every_o]; STEP",
    "state_dict": "[o.opt.load_state_dict(saved(o)) for o in every_o]; zero(*every_o)",
    "full_state_dict": "[full(o) for o in every_o]; STEP",
    "load_full_state_dict": "[load_full(o, full(o)) for o in every_o]; STEP",
    "observe": "[o.opt.observe() for o in every_o]; STEP",
    "close": "[renew(o) for o in every_o]",
}
TEXT = """
shapes = [[(size,) for size in {sizes}[o::{count}]] for o in range({count})]
every_o = [optimizer(of_one, stage={stage}, bucket_cap_mb={cap}) for of_one in shapes]

def chain(factor, raises_after=None):
    # The optimizers' parameters in turn. The last one's gradient comes first.
    links = [use(every_o[i % {count}], i // {count}, factor * (i + 1) / 8) for i in range(len({sizes}))]
    if raises_after is not None:
        links.insert(len(links) - raises_after, boom)
    return links

back(chain(1.0), chain(3.0)); all_reduce(1.0); STEP
back({raising})
{between}
{then}
back(chain(1.5), chain(0.5)); all_reduce(1.0); STEP
back(chain(-1.0), chain(2.0)); all_reduce(1.0); STEP
"""


def program(stage: int, optimizers: int, raising: Sequence[int], after: int, then: str) -> Program:
    """``raising``: ranks; ``after``: how many gradients come before; ``then``: what follows. Every optimizer has every
    ``optimizers``-th parameter, so that their gradients come in turns."""
    factors = (2.0, -1.0)
    chains = [f"chain({factors[rank]}, {after if rank in raising else None})" for rank in range(RANKS)]
    between = "all_reduce(1.0)" if stage > 0 else ""  # at stage 0 the other rank waits in backward, for averages
    text = TEXT.format(
        sizes=SIZES,
        count=optimizers,
        stage=stage,
        cap=CAP_MB,
        raising=", ".join(chains),
        between=between,
        then=FOLLOWED_BY[then],
    )
    return Program(RANKS, text.replace("STEP", "step(*every_o); zero(*every_o)"))


def _verdict(made: Program, rank: int) -> str | None:
    """Where a rank waits for one that has raised, all patience is in vain."""
    with impatient():
        return verdict(made, rank)


def _check(programs: Sequence[Program]) -> None:
    check(*programs, judge=_verdict)


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
        with impatient():
            play(program(stage, 1, (0,), 0, then), zero_optim, rank)
    except zero_optim.ZeroOptimError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("stage", "then"), [(0, "zero_grad"), (1, "backward"), (2, "backward"), (2, "module_zero_grad")]
)
def test_ranks_that_wait_for_each_other_in_vain_are_told_within_seconds(stage: int, then: str):
    """Long before the group's time-out, which would have other words. The ranks leave when it is over."""
    for text in run_ranks(RANKS, _parted, stage, then, collective_timeout=5):
        assert text.startswith("RankMismatchError: the ranks wait for each other"), text
        fewer = 1 if stage == 0 else 2  # since the optimizer was made
        assert f"rank 0 has reduced {fewer}, rank 1 has reduced {fewer + 1}" in text
        assert "opt.zero_grad()" in text
