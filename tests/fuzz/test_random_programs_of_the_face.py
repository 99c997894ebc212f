"""Random programs of the whole public face with fixed seeds, and what the model itself has to know.

``python -m fuzz`` runs as many as there is time for; see this package's docstring.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from cells import slow
from programs.run import run_alone, run_batch
from programs.search import check_all
from programs.shrink import shrink
from zero_optim.comm.sharding import Sharding

from fuzz.execute import FACE, Face
from fuzz.generate import ALONE, EMPTY, GROUPS, PLAIN, RULED, SEVERAL, SLICES, STAGE3, STEPS, STORED, Flavour, program
from fuzz.known import KNOWN
from fuzz.law import why_not
from fuzz.oracle import compare, expected
from fuzz.program import (
    WHOLE,
    AllReduce,
    Backward,
    Boom,
    Clip,
    Enter,
    Group,
    Leave,
    ModuleZero,
    Optim,
    Program,
    Step,
    Use,
    Zero,
    arrivals,
)
from fuzz.script import stand_alone, text
from fuzz.shrink import candidates


def _of_world(flavour: Flavour, first_seed: int, world: int) -> Iterator[Program]:
    return (made for seed in itertools.count(first_seed) if (made := program(seed, flavour)).world == world)


FIRST_SEEDS = {"steps and what comes between": 46}
"""Of the others: 0. From 46 on two programs show averages that stay after a drop, or after zeroing in place."""


DRAWN = {
    "plain": (PLAIN, 2, 5, 13),
    "plain, three ranks": (PLAIN, 3, 2, 4),
    "empty parameters": (EMPTY, 2, 4, 10),
    "empty parameters, three ranks": (EMPTY, 3, 2, 4),
    "one rank": (ALONE, 1, 4, 10),
    "steps and what comes between": (STEPS, 2, 16, 16),
    "steps on three ranks": (STEPS, 3, 2, 6),
    "stores on two ranks": (STORED, 2, 6, 16),
    "stores on three ranks": (STORED, 3, 1, 3),
    "stores on one rank": (STORED, 1, 3, 8),
    "stage 3": (STAGE3, 2, 4, 8),
    "stage 3, three ranks": (STAGE3, 3, 1, 2),
    "slices of two tensor-parallel ranks": (SLICES, 4, 4, 8),
    "other rules, and averages": (RULED, 2, 4, 10),
    "rules by group": (GROUPS, 2, 3, 8),
    "rules by group, three ranks": (GROUPS, 3, 1, 3),
    "several optimizers": (SEVERAL, 2, 4, 8),
    "several optimizers, three ranks": (SEVERAL, 3, 1, 2),
}
"""What they are of, on how many ranks, and how many there are: in ``make test``, and in all."""


@pytest.mark.parametrize(
    ("name", "flavour", "world", "first", "last"),
    [
        pytest.param(name, flavour, world, first, last, id=name + part, marks=marks)
        for name, (flavour, world, few, count) in DRAWN.items()
        for part, first, last, marks in (("", 0, few, ()), (", the others", few, count, slow))
        if first < last
    ],
)
def test_programs_do_what_the_model_says(name, flavour, world, first, last):
    programs = _of_world(flavour, FIRST_SEEDS.get(name, 0), world)
    check_all(FACE, list(itertools.islice(programs, first, last)), name, most=2)


@pytest.mark.parametrize("name", KNOWN)
def test_what_once_went_wrong(name):
    assert why_not(KNOWN[name]) is None
    check_all(FACE, [KNOWN[name]], name)


OPTIM = Optim(shapes=((300,), (5,)), groups=(Group((0, 1)),))
BOTH = (Use(0, 0, 1.0), Use(0, 1, 0.5))


def _program(*ops: object) -> Program:
    return Program(2, (OPTIM,), ops)


class Faulty(Face):
    """What two tensor-parallel ranks both have counts twice in the norm, and terms of its gradient are not added up."""

    def run(self, program, rank, folder, see):
        holders = Sharding.holders
        counted = mock.patch.object(Sharding, "holders", lambda self, *, cut: holders(self, cut=True))
        with counted, mock.patch.object(Sharding, "sum_over_slices"):
            super().run(program, rank, folder, see)


def test_faults_in_what_ranks_of_a_row_both_have_are_seen():
    """The first parameter is cut. Of the others the second one's gradient comes in terms, and the third one's whole."""
    cut = Optim(shapes=((5,),) * 3, groups=(Group((0, 1, 2)),), cut=(0, WHOLE, WHOLE))

    def using(*parameters):
        return Backward((tuple(Use(0, p) for p in parameters),) * 4)

    clipped = Program(4, (cut,), (using(0, 2), Clip(0, 1.0)))
    in_terms = Program(4, (cut,), (using(0, 1), Step(0)))
    right = Program(4, (cut,), (using(0), Clip(0, 1.0), Step(0)))
    programs = [clipped, in_terms, right]
    assert [why_not(made) for made in programs] == [None] * 3
    assert not [*run_batch(FACE, programs)]
    found = {failure.program: failure.message for failure in run_batch(Faulty(), programs)}
    assert [*found] == [clipped, in_terms]
    assert "Clip" in found[clipped] and "Step" in found[in_terms]


class OneMatrix(Face):
    """Muon's views are left out."""

    def run(self, program, rank, folder, see):
        with mock.patch("zero_optim.rules.muon.blocks_of", lambda matrices, view: [matrices]):
            super().run(program, rank, folder, see)


def test_a_view_that_is_left_out_is_seen():
    """The matrices of a program have the rank that their directions need."""
    muon, rest = Group((0,), 1.0, rule="muon", view=("rows", 2)), Group((1,), rule="lion")
    viewed = Program(2, (Optim(shapes=((20, 60), (5,)), groups=(muon, rest)),), (Backward((BOTH, BOTH)), Step(0)))
    whole = replace(viewed, optims=(replace(viewed.optims[0], groups=(replace(muon, view=None), rest)),))
    assert [why_not(made) for made in (viewed, whole)] == [None, None]
    assert not [*run_batch(FACE, [viewed, whole])]
    assert [failure.program for failure in run_batch(OneMatrix(), [viewed, whole])] == [viewed]


def test_a_program_is_its_repr():
    import fuzz.program

    for seed in range(20):
        made = program(seed, (SEVERAL, GROUPS)[seed % 2])
        assert eval(repr(made), vars(fuzz.program)) == made


def test_a_script_stands_alone():
    script = stand_alone(program(0, STAGE3), "a title")
    assert "from programs" not in script and "from fuzz" not in script
    names = {"__name__": "a script"}
    exec(script, names)
    assert all(name in names for name in ("program", "spawn", "boom", "forward_boom", "backward", "Net"))


def test_gradients_arrive_from_the_last_link_to_the_first_use():
    chain = (Use(0, 0, 1.0), Use(0, 1, 1.0), Boom(), Use(0, 0, 0.5), Use(0, 2, 2.0))
    assert arrivals(chain, lambda o, p: True).grads == ((0, 2, 2.0),)
    assert arrivals(chain[:2] + chain[3:], lambda o, p: p != 1).grads == ((0, 2, 2.0), (0, 0, 1.5))
    assert arrivals((*chain, Boom(forward=True)), lambda o, p: True).raised == "forward"


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        ((Backward((BOTH, None)),), "step has to follow"),
        ((Backward((BOTH, None)), Zero(0), Step(0)), "step has to follow"),
        ((Backward((BOTH, BOTH)), Backward((BOTH, None)), Step(0)), "some ranks only"),
        ((Enter(0), Backward((BOTH, None)), Step(0)), "a block that does not end"),
        ((Backward((BOTH, (Boom(),))), ModuleZero(0), Step(0)), "step has to follow"),
        ((Backward((BOTH, None)), Backward((BOTH, BOTH), no_sync=(0,)), Step(0)), "no no_sync"),
    ],
)
def test_the_law_forbids(ops, reason):
    assert reason in why_not(_program(*ops))


@pytest.mark.parametrize(
    "ops",
    [
        (Backward((BOTH, None)), AllReduce(1.0), Step(0)),
        (Enter(0), Backward((BOTH, None)), Backward((None, BOTH)), Leave(0), Step(0)),
        (Backward((BOTH, BOTH)), Backward((BOTH, None), no_sync=(0,)), Step(0)),
        (Zero(0), Backward((BOTH, (Boom(),))), Zero(0), Backward((BOTH, BOTH))),
        (Backward((BOTH, (Boom(), *BOTH))), ModuleZero(0), Backward((BOTH, BOTH)), Step(0)),
    ],
)
def test_the_law_allows(ops):
    assert why_not(_program(*ops)) is None


def test_a_wrong_number_is_seen():
    made = _program(Backward((BOTH, BOTH)), Step(0))
    seen = [[(i, *values) for i, values in enumerate(rank)] for rank in zip(*expected(made), strict=True)]
    seen = [copy.deepcopy(rank) for rank in seen]  # the ranks' arrays are the same ones
    assert compare(made, expected(made), seen) is None
    seen[1][1][1][0][7] += 1e-3
    told = compare(made, expected(made), seen)
    assert told is not None and told.startswith("operation 1 (Step(o=0, ") and "), rank 1: " in told


def test_another_bit_from_a_store_is_seen():
    made = replace(_program(Backward((BOTH, BOTH)), Step(0)), optims=(replace(OPTIM, store="cpu"),))
    seen = [[(i, *values) for i, values in enumerate(rank)] for rank in zip(*expected(made), strict=True)]
    both = [[(of, *copy.deepcopy(entry)) for of in ("", "without stores") for entry in rank] for rank in seen]
    assert FACE.verdict(made, both) is None
    values = both[1][1][2][0]
    values[7] = np.nextafter(values[7], np.float32(9))
    told = FACE.verdict(made, both)
    assert told is not None and told.startswith("operation 1 (Step(o=0, ") and "where nothing is in a store" in told


def test_what_raises_is_told_with_its_line_and_the_rest_of_its_batch_runs():
    right = _program(Backward((BOTH, BOTH)), Step(0))
    raising = [Program(2, (Optim(shapes=((n,),), groups=(Group((0,), lr=-1.0),)),), ()) for n in (3, 4)]
    failures = list(run_batch(FACE, [right, raising[0], right, raising[1]]))
    assert [failure.program for failure in failures] == raising
    assert all(failure.kind == "raises" and "lr" in failure.message for failure in failures)


def test_a_failure_is_made_short():
    wrong = Optim(shapes=((300,), (5,), (7,)), groups=(Group((0, 2)), Group((1,), lr=-1.0)))
    made = Program(2, (wrong,), (Backward((BOTH, BOTH)), Step(0), Zero(0), Backward((BOTH, None)), Step(0)))
    failure = run_alone(FACE, made)
    assert failure is not None
    short = shrink(FACE, failure, seconds=60)
    assert short.program.ops == () and len(short.program.optims[0].shapes) == 1
    assert why_not(short.program) is None and "def program" in text(short.program)
    assert all(candidate != made for candidate in candidates(made))
