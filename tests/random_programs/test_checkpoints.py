"""Random programs save and load checkpoints, and each rank then has what ``checkpoints.law`` says, in bits."""

from __future__ import annotations

from unittest import mock

import hypothesis
import pytest
from cells import slow_after
from hypothesis import HealthCheck, Phase, given, settings

from random_programs.checkpoints import check, load
from random_programs.draw_checkpoints import programs


def check_examples(saving, loading, examples, seed=0, load=load, **more):
    """The first example is the simplest program. ``seed``, which goes before ``derandomize``: of the others."""

    @hypothesis.seed(seed)
    @settings(deadline=None, database=None, max_examples=examples, suppress_health_check=list(HealthCheck), **more)
    @given(programs(saving, loading))
    def obeys(program):
        check(program, load)

    obeys()


@pytest.mark.parametrize("examples", slow_after(1, [3, 6]))
@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (3, 3), (2, 3), (4, 2), (1, 4)])
def test_programs_obey_the_law(saving, loading, examples):
    check_examples(saving, loading, examples, seed=100 * saving + 10 * loading + examples)


def _forgetful_load(*args):
    with mock.patch("zero_optim.checkpoint.loading.set_random_states"):
        return load(*args)


def test_random_states_that_are_not_restored_are_found():
    with pytest.raises(AssertionError, match=r"loaded: .*random"):
        check_examples(1, 1, 20, load=_forgetful_load, phases=[Phase.generate])
