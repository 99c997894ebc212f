"""Random programs save and load checkpoints, and each rank then has what ``checkpoints.law`` says, in bits."""

from __future__ import annotations

import pytest
from cells import slow_after

from random_programs.checkpoints import check
from random_programs.draw import check_drawn, programs
from random_programs.draw_checkpoints import program


@pytest.mark.parametrize("count", slow_after(1, [3, 6]))
@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (3, 3), (2, 3), (4, 2), (1, 4)])
def test_programs_obey_the_law(saving, loading, count):
    check_drawn(programs(program, [saving], [loading]), check, 100 * saving + 10 * loading + count, count)
