"""Random programs save and load checkpoints, and each rank then has what ``checkpoints.law`` says, in bits."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
from cells import slow_after

from random_programs.checkpoints import check, load
from random_programs.draw import check_drawn, programs
from random_programs.draw_checkpoints import program


@pytest.mark.parametrize("count", slow_after(1, [3, 6]))
@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (3, 3), (2, 3), (4, 2), (1, 4)])
def test_programs_obey_the_law(saving, loading, count):
    check_drawn(programs(program, [saving], [loading]), check, 100 * saving + 10 * loading + count, count)


def _forgetful_load(*args):
    with mock.patch("zero_optim.checkpoint.loading.set_random_states"):
        return load(*args)


def test_random_states_that_are_not_restored_are_found():
    with pytest.raises(AssertionError, match=r"loaded: .*random"):
        check_drawn(programs(program, [1], [1]), partial(check, load=_forgetful_load), 0, 20)
