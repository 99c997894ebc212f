"""Random programs about optimizers, those that once went wrong, and faults that have to be found."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
from cells import slow

from random_programs import run
from random_programs.draw import AT_ONCE, check_drawn, programs
from random_programs.draw_optimizers import FLAVOURS, program
from random_programs.run import Program, check, verdict

FEW = 4  # programs of a flavour in ``make test``; ``make test-all`` runs ten others


@pytest.mark.parametrize(("seed", "count"), [(0, FEW), pytest.param(1, AT_ONCE, marks=slow)])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_programs_compute_what_plain_torch_does(flavour, seed, count):
    check_drawn(programs(program, FLAVOURS[flavour]), check, seed, count)


def known() -> dict[str, Program]:
    found = {}
    for section in Path(__file__).with_name("known.txt").read_text().split("\n== ")[1:]:
        head, _, text = section.partition("\n")
        name, ranks = re.fullmatch(r"(.*) \((\d) ranks?\)", head).groups()
        found[name] = Program(int(ranks), f"{text.strip()}\n")
    return found


@pytest.mark.parametrize("name", known())
def test_what_once_went_wrong(name):
    check(known()[name])


def _another_bit(made: Program, rank: int) -> str | None:
    """One bit of what is seen, where state is in a store."""
    play = run.play

    def other(made: Program, library, rank: int, stored: bool = True, more=None):
        seen = play(made, library, rank, stored, more)
        if not stored:
            seen[-1][0][7] *= 1 + 2**-23
        return seen

    with mock.patch.object(run, "play", other):
        return verdict(made, rank)


def test_another_bit_from_a_store_is_found():
    made = Program(2, "a = optimizer([(300,)], store='cpu')\nback(every(a))\nstep(a)\n")
    check(made)
    with pytest.raises(AssertionError, match=r"without a store: .*\[7\]"):
        check(made, judge=_another_bit)


def test_what_raises_shows_its_line():
    with pytest.raises(AssertionError, match="step_backwards"):
        check(Program(1, "a = optimizer([(5,)])\nstep_backwards(a)\n"))
