"""Every cell of the tables below: what a scan of each ``.grad``, and each event, makes of each state of a slot.

====================  ==================  =====================  =======================  ===================
state                 the bucket holds    ``.grad`` found None   ``.grad`` is the handle  ``.grad`` is other
====================  ==================  =====================  =======================  ===================
ABSENT                nothing             ABSENT                 --                       ABSENT, local
COLLECTED             this rank's sum     ABSENT                 COLLECTED                ABSENT, local
AVERAGED              the average         STALE                  AVERAGED                 STALE, local
TAKEN                 the average         STALE                  AVERAGED                 TAKEN, local
STALE                 what to drop        STALE                  AVERAGED                 STALE, local
====================  ==================  =====================  =======================  ===================

The *handle* is the tensor that the bucket has put into ``.grad``. *local*: ``.grad`` is a gradient of this rank
that the bucket does not hold yet. Where the user has replaced what autograd left in ``.grad``, a TAKEN slot becomes
STALE: what is there stands for the whole gradient. The columns are what ``scan`` does with each ``.grad`` that it
finds; four more events change all slots of a bucket, or one:

====================  ==================  =====================  =======================  ===================
state                 accumulate          collect                launch                   clear
====================  ==================  =====================  =======================  ===================
ABSENT                ABSENT              COLLECTED if local     AVERAGED                 ABSENT
COLLECTED             COLLECTED           COLLECTED              AVERAGED                 ABSENT
AVERAGED              TAKEN               --                     AVERAGED                 ABSENT
TAKEN                 TAKEN               --                     AVERAGED                 ABSENT
STALE                 STALE               --                     AVERAGED                 ABSENT
====================  ==================  =====================  =======================  ===================

- *accumulate*: autograd is about to add to ``.grad``, after ``scan`` has looked at it. A reduced gradient is an
  average over ranks; to add this rank's own to it would be wrong. So it is taken out of ``.grad``, the new one
  arrives alone, and is reduced and added later.
- *collect*: local gradients move into ``grad_buffer``. *launch*: a reduction is launched with them; what is STALE
  is dropped before the sum is added. *clear*: ``zero_grad``.
- Three are outside of the tables: *drop_all* and *make_room* make all slots STALE, the second in a bucket that is
  to receive averages from another layout; *take_over* then makes one AVERAGED.
"""

from __future__ import annotations

import pytest
import torch
from tables import table
from torch import nn
from zero_optim.grads.slots import GradState, Slots, SlotState

FOUND = table(__doc__, "state")  # of the two tables, the one that comes first
EVENTS = table(__doc__[__doc__.index("more events change all slots") :], "state")
OTHERS = {state.name for state in SlotState}


class Bench:
    """Two slots, one to be looked at and one beside it, brought into a state by what a user and autograd would do."""

    def __init__(self, state: SlotState) -> None:
        self.params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        self.slots = Slots(self.params)
        self.views = [torch.full((2,), 10.0), torch.full((2,), 11.0)]
        self.handles = [torch.full((2,), 20.0), torch.full((2,), 21.0)]
        self.local = torch.full((2,), 5.0)
        if state is SlotState.COLLECTED:
            self.slots.collect([(0, self.local), (1, self.local)], self.views)
        elif state is not SlotState.ABSENT:
            self.slots.launch([(0, self.local), (1, self.local)], self.handles)
        if state is SlotState.TAKEN:
            self.slots.accumulate(0, self.handles[0])
            self.params[0].grad = self.local
        if state is SlotState.STALE:
            self.params[0].grad = None
            self.slots.scan(self.handles)
        assert self.slots[0] is state

    def current(self) -> list[torch.Tensor | None]:
        by_state = {GradState.EMPTY: [None, None], GradState.LOCAL: self.views, GradState.REDUCED: self.handles}
        return by_state[self.slots.bucket_state]


def test_the_tables_have_every_state():
    assert {state for state, _ in FOUND} == {state for state, _ in EVENTS} == OTHERS
    assert len(FOUND) == 4 * len(OTHERS) and len(EVENTS) == 4 * len(OTHERS)


CELLS = [(state, column, after) for (state, column), after in FOUND.items() if column.startswith("``.grad``")]


@pytest.mark.parametrize(("before", "column", "after"), CELLS)
def test_what_a_scan_makes_of_a_slot(before: str, column: str, after: str):
    if after == "--":
        return  # there is no handle
    bench = Bench(SlotState[before])
    other = torch.full((2,), 7.0)
    kind = column.split()[-1]
    bench.params[0].grad = {"None": None, "handle": bench.current()[0], "other": other}[kind]
    found = bench.slots.scan(bench.current())
    name, _, local = after.partition(", ")
    assert bench.slots[0] is SlotState[name]
    assert [index for index, _ in found.local] == ([0] if local else [])
    held = before in ("COLLECTED", "AVERAGED") or (before == "TAKEN" and kind == "None")
    assert found.gone == ([0] if held and kind != "handle" else [])
    assert bench.slots.used[0] == (before not in ("ABSENT", "STALE") and not found.gone)


@pytest.mark.parametrize("state", SlotState)
def test_what_the_bucket_holds(state: SlotState):
    held = {GradState.EMPTY: ("nothing",), GradState.LOCAL: ("this rank's sum",)}
    in_shard = ("the average", "what to drop")
    assert FOUND[state.name, "the bucket holds"] in held.get(Bench(state).slots.bucket_state, in_shard)


@pytest.mark.parametrize(("before", "event", "after"), [(*cell, after) for cell, after in EVENTS.items()])
def test_what_an_event_makes_of_a_slot(before: str, event: str, after: str):
    if after == "--":
        return  # a bucket that holds averages collects nothing
    bench = Bench(SlotState[before])
    if event == "accumulate":
        bench.slots.accumulate(0, bench.current()[0])
        assert (bench.params[0].grad is None) is (before in ("ABSENT", "AVERAGED", "STALE"))
    elif event == "collect":
        bench.slots.collect([(0, bench.local)], bench.views)
        assert bench.params[0].grad is bench.views[0]
    elif event == "launch":
        bench.slots.launch([], bench.handles)
        assert bench.params[0].grad is bench.handles[0]
    else:
        bench.slots.clear()
        assert bench.params[0].grad is None and not any(bench.slots.used)
    assert bench.slots[0] is SlotState[after.split()[0]]


def test_a_local_gradient_that_the_user_has_replaced_stands_for_the_average_too():
    bench = Bench(SlotState.TAKEN)
    bench.slots.backward_ended()
    bench.params[0].grad = torch.full((2,), 7.0)
    found = bench.slots.scan(bench.handles)
    assert found.gone == [0] and [index for index, _ in found.local] == [0]
    assert bench.slots[0] is SlotState.STALE


def test_a_local_gradient_zeroed_in_place_is_told_once_its_backward_has_ended():
    bench = Bench(SlotState.TAKEN)
    bench.local.mul_(2)  # within the backward: by a hook
    assert not bench.slots.scan(bench.handles).zeroed
    bench.slots.backward_ended()
    assert not bench.slots.scan(bench.handles).zeroed
    bench.local.zero_()
    assert [index for index, _ in bench.slots.scan(bench.handles).zeroed] == [0]
    bench.slots.backward_ended()  # of one that has not added to it
    assert bench.slots.accumulate(0, bench.handles[0]), "before it is hidden by what autograd adds"
    bench.local.add_(3)
    assert not bench.slots.scan(bench.handles).zeroed and not bench.slots.accumulate(0, bench.handles[0])
