"""Every cell of the tables of ``RoundState``: what each event makes of each state, and what is owed in it."""

from __future__ import annotations

import pytest
from tables import table
from zero_optim.grads.rounds import RoundCounter, RoundState

EVENTS = table(RoundState.__doc__, "event")
STATES = table(RoundState.__doc__, "state")


def test_the_tables_have_every_state_and_every_event():
    names = {state.name for state in RoundState}
    assert {state for state, _ in STATES} == names
    assert {state for _, state in EVENTS} == names
    methods = {name for name, value in vars(RoundCounter).items() if callable(value) and not name.startswith("_")}
    assert {event for event, _ in EVENTS} == methods
    assert len(EVENTS) == len(names) * len(methods)


@pytest.mark.parametrize(
    ("state", "owed"), [(state, int(owed)) for (state, column), owed in STATES.items() if column == "owed"]
)
def test_what_is_owed(state: str, owed: int):
    assert RoundState[state].owed == owed


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in EVENTS.items()])
def test_a_cell(event: str, before: str, after: str):
    machine = RoundCounter()
    machine.state = RoundState[before]
    if after == "error":
        with pytest.raises(RuntimeError, match=event):
            getattr(machine, event)()
        assert machine.state is RoundState[before]
    else:
        getattr(machine, event)()
        assert machine.state is RoundState[after]


def test_launched_counts_since_the_last_step_or_zero_grad():
    machine = RoundCounter()
    for forget in (machine.clear, machine.step):
        for _ in range(2):
            machine.begin()
            machine.complete()
            machine.completed()
        assert machine.launched == 2
        forget()
        assert machine.launched == 0


def test_zeroed_says_whether_this_is_not_the_first_zero_grad_since_a_step():
    machine = RoundCounter()
    seen = []
    for event in (machine.clear, machine.clear, machine.step, machine.clear, machine.step, machine.step):
        seen.append(machine.zeroed)
        event()
    assert seen == [False, True, True, False, True, False]
