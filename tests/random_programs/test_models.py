"""Random programs that call models, parts of them and methods: in plain torch, at stage 2 and at stage 3."""

from __future__ import annotations

from functools import partial

import pytest
from cells import slow

from random_programs.draw import check_drawn, programs
from random_programs.draw_models import program
from random_programs.models import verdict
from random_programs.run import check


@pytest.mark.parametrize(("world", "seed"), [(1, 0), (2, 0), (3, 0), pytest.param(2, 1, marks=slow)])
def test_stages_2_and_3_compute_what_plain_torch_does(world, seed):
    check_drawn(programs(program, [world]), partial(check, judge=verdict), seed)
