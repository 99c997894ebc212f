"""Random programs that call models, parts of them and methods: in plain torch, at stage 2 and at stage 3."""

from __future__ import annotations

from functools import partial

import pytest
from cells import slow

from random_programs.draw import check_drawn, programs
from random_programs.draw_models import program
from random_programs.models import verdict
from random_programs.run import Program, check


@pytest.mark.parametrize(("world", "seed"), [(1, 0), (2, 0), (3, 0), pytest.param(2, 1, marks=slow)])
def test_stages_2_and_3_compute_what_plain_torch_does(world, seed):
    check_drawn(programs(program, [world]), partial(check, judge=verdict), seed)


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
