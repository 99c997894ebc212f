"""The seeded faults fit today's source, and one of them is noticed. ``make race-check`` runs all."""

from __future__ import annotations

import ast

import pytest
from cells import slow_after

from simulated_gpu.faults import FAULTS, Fault, check
from simulated_gpu.switch import require


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_source(fault: Fault) -> None:
    ast.parse(fault.applied(), fault.file)


@pytest.mark.parametrize("fault", slow_after(1, FAULTS), ids=lambda fault: fault.name)
def test_it_is_noticed(fault: Fault) -> None:
    require(fault.simulated)
    assert check(fault)
