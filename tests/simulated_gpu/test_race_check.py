"""A part of ``make race-check``: half of the kinds of order programs, and one seeded fault.

Programs must have right numbers, no race, and one order of collectives on all ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import pytest
from harness import run_ranks
from order_programs import DEFAULT, SIDE, OrderProgram, few_programs, train_all, wrong

from simulated_gpu.faults import FAULTS, Fault, check
from simulated_gpu.switch import LATE, require

REVEALING = list(dict.fromkeys(fault.program for fault in FAULTS))
OTHERS = [program for program in few_programs(each=1) if program.what not in {one.what for one in REVEALING}]
CALLS = [REVEALING[:8], REVEALING[8:], OTHERS[:8]]  # a call of ranks takes as long as a program


def _check(programs: Sequence[OrderProgram], simulated: str, ranks: int = 2) -> None:
    found = wrong(run_ranks(ranks, train_all, programs, simulated=simulated), programs)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("programs", CALLS, ids=lambda call: f"from {call[0].what} to {call[-1].what}")
def test_on_two_ranks(programs: Sequence[OrderProgram]) -> None:
    _check(programs, LATE)


def test_on_one_rank() -> None:
    """Two ranks wait for each other. One alone shows what autograd does not order where a backward raises."""
    raised = [OrderProgram(stage, "raised", DEFAULT, SIDE) for stage in (0, 2, 3)]
    _check(raised, LATE, ranks=1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_source(fault: Fault) -> None:
    ast.parse(fault.applied(), fault.file)


def test_a_fault_is_noticed() -> None:
    fault = FAULTS[0]
    require(fault.simulated)
    assert check(fault)
