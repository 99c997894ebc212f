"""A part of ``make race-check``: every kind of order program once, and one seeded fault.

Programs must have right numbers, no race, and one order of collectives on all ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import pytest
from cells import slow_after
from harness import run_ranks
from order_programs import DEFAULT, SIDE, OrderProgram, few_programs, train_all, wrong

from simulated_gpu.faults import FAULTS, Fault, check
from simulated_gpu.switch import LATE, ON_GPU_1, require

REVEALING = list(dict.fromkeys(fault.program for fault in FAULTS))
OTHERS = [program for program in few_programs(each=1) if program.what not in {one.what for one in REVEALING}]
AT_ONCE = 8  # a call of ranks takes as long as a program
CALLS = [programs[i : i + AT_ONCE] for programs in (REVEALING, OTHERS) for i in range(0, len(programs), AT_ONCE)]


def _check(programs: Sequence[OrderProgram], simulated: str, ranks: int = 2) -> None:
    found = wrong(run_ranks(ranks, train_all, programs, simulated=simulated), programs)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("programs", slow_after(3, CALLS), ids=lambda call: f"from {call[0].what} to {call[-1].what}")
def test_on_two_ranks(programs: Sequence[OrderProgram]) -> None:
    _check(programs, LATE)


def test_on_one_rank() -> None:
    """Two ranks wait for each other. One alone shows what autograd does not order where a backward raises."""
    raised = [OrderProgram(stage, "raised", DEFAULT, SIDE) for stage in (0, 2, 3)]
    _check(raised, LATE, ranks=1)


@pytest.mark.slow
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    programs = [OrderProgram(2, "paged, some stay, clipped"), OrderProgram(3, "parameters on the host, updated there")]
    _check(programs, ON_GPU_1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_source(fault: Fault) -> None:
    ast.parse(fault.applied(), fault.file)


@pytest.mark.parametrize("fault", slow_after(1, FAULTS), ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault: Fault) -> None:
    require(fault.simulated)
    assert check(fault)
