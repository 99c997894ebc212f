"""The table of seeded faults fits today's source, and some of it is caught. ``make race-check`` runs all."""

from __future__ import annotations

import pytest

from simulated_gpu import Unavailable
from simulated_gpu.fault_check import verdict
from simulated_gpu.faults import FAULTS, PACKAGE, UNSEEN, Fault

FEW = (
    "GradStreams.join waits for no stream",
    "launch drops gradients without keep",
    "FlatShard.local does not wait",
    "whole_of copies its own part after the gather began",
)


def test_there_are_enough_and_each_has_a_name():
    assert len(FAULTS) - len(UNSEEN) >= 25
    assert UNSEEN.keys() <= {fault.name for fault in FAULTS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_changes_what_is_there(fault: Fault):
    for edit in fault.edits:
        assert (PACKAGE / edit.file).read_text().count(edit.old) == 1, edit


@pytest.mark.parametrize("name", FEW)
def test_it_is_caught(name: str):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    try:
        found = verdict(fault)
    except Unavailable as missing:
        pytest.skip(missing.reason)
    assert found.outcome == "race", found
