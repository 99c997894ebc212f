"""The table of seeded faults fits today's source, and some of it is caught. ``make race-check`` runs all."""

from __future__ import annotations

import ast

import pytest

from simulated_gpu.fault_check import verdict
from simulated_gpu.faults import FAULTS, PACKAGE, Fault

FEW = (
    "GradStreams.join waits for no stream",
    "launch drops gradients without keep",
    "FlatShard.local does not wait",
    "whole_of copies its own part after the gather began",
)


def test_each_has_a_name_and_its_reasons():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert [fault.name for fault in FAULTS if bool(fault.hidden_by) != (len(fault.edits) > 1)] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_changes_what_is_there(fault: Fault):
    texts: dict[str, str] = {}
    for edit in fault.edits:
        texts[edit.file] = edit.applied_to(texts.get(edit.file) or (PACKAGE / edit.file).read_text())
    for file, text in texts.items():
        ast.parse(text, file)


@pytest.mark.parametrize("name", FEW)
def test_it_is_caught(device: None, name: str):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    found = verdict(fault)
    assert found.outcome == "race", found
