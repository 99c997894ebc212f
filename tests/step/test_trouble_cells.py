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


@pytest.mark.parametrize(
    ("before", "event", "parameters", "said"),
    [
        ("WHOLE", "unwritten", {2}, ["now"]),
        ("UNWRITTEN", "unwritten", {1, 2}, ["before", "now"]),
        ("LOST", "unwritten", {1}, ["before"]),  # what is lost is all that matters
        ("WHOLE", "lose", {2}, ["now"]),
        ("UNWRITTEN", "lose", {2}, ["now"]),
        ("LOST", "lose", {1, 2}, ["before", "now"]),
        ("UNWRITTEN", "told", set(), []),
        ("LOST", "told", {1}, ["before"]),
    ],
)
def test_what_is_told(before: str, event: str, parameters: set[int], said: list[str]):
    of = _in(before)
    _happen(of, event, {2}, "now")
    assert of.parameters == parameters
    assert len(of.reasons) == len(said)
    for reason, word in zip(of.reasons, said, strict=True):
        assert reason.startswith(word)
        assert reason in str(of.error())


def test_only_what_was_not_written_is_said_to_be_whole():
    assert "state is whole" in str(_in("UNWRITTEN").error())
    assert "state is whole" not in str(_in("LOST").error())
