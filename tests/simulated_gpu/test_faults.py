"""The table of seeded faults fits today's source, and some of it is caught. ``make race-check`` runs all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from cells import slow_after

from simulated_gpu.fault_check import verdict
from simulated_gpu.faults import FAULTS, PACKAGE, Edit, Fault

FEW = (  # one in each simulation comes first
    "comm.streams.GradStreams.join: wait_stream(stream) (no_sync)",
    "comm.sharding.Sharding.whole_of: self.own_part(full).copy_(shard) behind all_gather(...) (relaid)",
    "grads.bucket.Bucket.launch: streams.keep(...) (used twice)",
    "params.flat_shard.FlatShard.local: arrivals.wait() (read)",
)


def test_each_has_a_name_and_its_reasons():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert [fault.name for fault in FAULTS if bool(fault.hidden_by) != (len(fault.edits) > 1)] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_changes_what_is_there(fault: Fault):
    texts: dict[Path, str] = {}
    for edit in fault.edits:
        texts[edit.file] = edit.applied_to(texts.get(edit.file) or (PACKAGE / edit.file).read_text())
    for file, text in texts.items():
        ast.parse(text, str(file))


def test_a_wait_that_is_gone_is_told_of():
    gone = Edit("comm.streams.GradStreams.join: current.join()")
    with pytest.raises(ValueError, match="'current.join\\(\\)' is there 0 times"):
        gone.applied_to((PACKAGE / gone.file).read_text())


@pytest.mark.parametrize("name", slow_after(2, FEW))
def test_it_is_caught(device: None, name: str):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    found = verdict(fault)
    assert found.outcome == "race", found
