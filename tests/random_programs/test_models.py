"""Random programs that call models, parts of them and methods: in plain torch, at stage 2 and at stage 3."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from random_programs.draw import Draw
from random_programs.draw_models import program
from random_programs.models import verdict
from random_programs.run import Program, check


@st.composite
def programs(draw: Any, world: int) -> Program:
    return program(Draw(draw), world)


NEW = settings(max_examples=10, deadline=None, database=None, suppress_health_check=[*HealthCheck])
"""From the eleventh example on, hypothesis only varies those that it has drawn."""


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_stages_2_and_3_compute_what_plain_torch_does(world, number):
    @NEW
    @seed(number)
    @given(programs(world))
    def drawn(drawn: Program) -> None:
        check(drawn, judge=verdict)

    drawn()


READS = """\
m = made(Model([Block()]), "float32")
shard(m, units=(Block,))
P = list(m.named_parameters())
opt = optimizer(P)
see(next(m.parameters()).sum())
"""


def test_a_program_that_is_wrong_is_found():
    """It reads a parameter where the docs say that it raises: at stage 3 alone."""
    with pytest.raises(AssertionError, match="(?s)<at stage 3>.*ShardAccessError"):
        check(Program(2, READS), judge=verdict)
