"""Every cell of the table in ``step.trouble``: what each event makes of a rank's state, and what is told of it."""

from __future__ import annotations

import contextlib

import pytest
from tables import table
from zero_optim.errors import OffloadError
from zero_optim.step import trouble
from zero_optim.step.trouble import Condition, Trouble

CELLS = table(trouble.__doc__, "event")


def _happen(of: Trouble, event: str, parameters: set[int], reason: str) -> None:
    if event == "told":
        of.told()
        return
    about = pytest.warns(UserWarning, match=f"{reason}.*next step") if event == "lose" else contextlib.nullcontext()
    with about:
        getattr(of, event)(parameters, OffloadError(reason))


def _in(condition: str) -> Trouble:
    of = Trouble()
    if condition != "WHOLE":
        _happen(of, {"UNWRITTEN": "unwritten", "LOST": "lose"}[condition], {1}, "before")
    assert of.condition is Condition[condition]
    return of


def test_the_table_has_every_state():
    assert {state for _, state in CELLS} == {state.name for state in Condition}


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in CELLS.items()])
def test_what_an_event_makes_of_it(event: str, before: str, after: str):
    of = _in(before)
    _happen(of, event, {2}, "now")
    assert of.condition is Condition[after]
