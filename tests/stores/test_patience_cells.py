"""Every cell of the table in ``stores.patience``."""

from __future__ import annotations

from typing import Any

import pytest
from tables import table
from zero_optim.errors import OffloadError
from zero_optim.stores import patience
from zero_optim.stores.patience import DiskState, Patience

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
