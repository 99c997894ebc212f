"""Every cell of the table in ``stores.patience``, and how long each state waits."""

from __future__ import annotations

from typing import Any

import pytest
from tables import table
from zero_optim.errors import OffloadError
from zero_optim.stores import patience
from zero_optim.stores.patience import PATIENCE_SECONDS, DiskState, Patience

CELLS = table(patience.__doc__, "event")


class _Transfer:
    def __init__(self, *, ends: bool, fails: bool = False) -> None:
        self.done, self._fails, self.waited = ends, fails or not ends, -1.0

    def wait(self, seconds: float) -> None:
        self.waited = seconds
        if self._fails:
            raise OffloadError("it has failed" if self.done else "it is not over")


def _with(disk: str) -> Patience:
    of = Patience()
    of.disk = DiskState[disk]
    return of


def _wait(of: Patience, verb: str, transfer: Any) -> None:
    getattr(of, f"wait_for_{verb}")(transfer)


def test_the_table_has_every_state():
    assert {state for _, state in CELLS} == {state.name for state in DiskState}


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in CELLS.items()])
def test_what_an_outcome_makes_of_a_disk(event: str, before: str, after: str):
    for verb in ("read", "write") if event == "over" else (event.removeprefix("late_"),):
        of = _with(before)
        if event == "over":
            _wait(of, verb, _Transfer(ends=True))
        else:
            with pytest.raises(OffloadError, match="not over"):
                _wait(of, verb, _Transfer(ends=False))
        assert of.disk is DiskState[after], verb


@pytest.mark.parametrize(
    ("disk", "verb", "seconds"),
    [
        ("ANSWERS", "read", PATIENCE_SECONDS),
        ("ANSWERS", "write", PATIENCE_SECONDS),
        ("BEHIND", "read", PATIENCE_SECONDS),
        ("BEHIND", "write", 0.0),
        ("SILENT", "read", 0.0),
        ("SILENT", "write", 0.0),
    ],
)
def test_how_long_it_is_waited_for(disk: str, verb: str, seconds: float):
    transfer = _Transfer(ends=True)
    _wait(_with(disk), verb, transfer)
    assert transfer.waited == seconds


@pytest.mark.parametrize(("disk", "verb"), [("BEHIND", "write"), ("SILENT", "write"), ("SILENT", "read")])
def test_who_was_not_waited_for_says_why(disk: str, verb: str):
    with pytest.raises(OffloadError, match=f"not over. A page before it was waited for {PATIENCE_SECONDS:g} s"):
        _wait(_with(disk), verb, _Transfer(ends=False))


@pytest.mark.parametrize("disk", [disk.name for disk in DiskState])
@pytest.mark.parametrize("verb", ("read", "write"))
def test_a_disk_that_says_that_it_has_failed_answers(verb: str, disk: str):
    of = _with(disk)
    with pytest.raises(OffloadError, match="has failed"):
        _wait(of, verb, _Transfer(ends=True, fails=True))
    assert of.disk is DiskState.ANSWERS
