"""The order programs under both simulations: right numbers, no race, and one order of collectives on all ranks.

Few of them are here. ``make race-check`` runs all.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import run_ranks
from order_programs import WHAT, OrderProgram, few_programs, wrong

from simulated_gpu.programs import train_all


def _check(programs: Sequence[OrderProgram], simulated: str) -> None:
    found = wrong(run_ranks(2, train_all, programs, simulated=simulated), programs)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("what", WHAT)
def test_with_streams(device: None, what: str) -> None:
    _check([program for program in few_programs() if program.what == what], "streams:never")


@pytest.mark.parametrize("what", WHAT)
def test_held_until_waited_for(what: str) -> None:
    programs = [program.on_one_stream for program in few_programs() if program.what == what]
    _check(list(dict.fromkeys(programs)), "held")
