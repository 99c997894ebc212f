"""Every cell of the tables of a unit: what is in memory in each state, as ``UnitState`` has it, and these events.

==================  ============  ============  ============  ============  ============
event               SHARDED       NODE_SHARDED  UNSHARDING    UNSHARDED     GATHERED
==================  ============  ============  ============  ============  ============
unshard             UNSHARDING    UNSHARDING    UNSHARDING    UNSHARDED     GATHERED
wait                SHARDED       NODE_SHARDED  UNSHARDED     UNSHARDED     GATHERED
wait: fails         SHARDED       NODE_SHARDED  UNSHARDING    UNSHARDED     GATHERED
reshard             SHARDED       SHARDED       SHARDED       SHARDED       GATHERED
reshard: to_node    SHARDED       NODE_SHARDED  NODE_SHARDED  NODE_SHARDED  GATHERED
gather              GATHERED      --            --            --            --
drop                SHARDED       NODE_SHARDED  UNSHARDING    UNSHARDED     SHARDED
==================  ============  ============  ============  ============  ============

- *wait: fails*: a collective has failed. What did not arrive is not shown, and can be waited for again.
- *reshard* in UNSHARDING waits first: the collective is under way, and the other ranks take part in it.
- *gather*: ``gather_parameters``. It reshards before, so it finds every unit SHARDED; one that it was entered for
  already stays as it is.

``keep_edits``, ``moved``, ``written`` and ``write_back`` are about values, and change no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tables import table
from torch import Tensor, nn
from zero_optim.errors import CollectiveError
from zero_optim.params.flat_params import FlatParams
from zero_optim.params.layout import build_layout
from zero_optim.params.param_shard import ParamShard
from zero_optim.units.unit import Registration, Unit, UnitState

STATES = table(UnitState.__doc__, "state")
EVENTS = table(__doc__, "event")
RANKS, OF_NODE = 4, 2
VALUES = torch.arange(1, 1001, dtype=torch.float32)


class FakePending:
    """A gather whose other ranks' parts arrive in ``wait``."""

    def __init__(self, comm: FakeComm, full: Tensor) -> None:
        self.comm, self.full = comm, full

    def wait(self) -> None:
        if self.comm.fails:
            raise CollectiveError("the others are gone")
        self.full[: len(VALUES)] = VALUES


@dataclass
class FakeComm:
    """Rank 0 of so many. Its collectives bring what the other ranks would send."""

    world_size: int
    fails: bool = False
    gathers: int = 0
    sends: Tensor | None = None  # in the last gather; None: what is in its place already

    shard_index = 0

    def alike(self, *, cut: bool) -> FakeComm:
        return self

    def broadcast(self, tensor: Tensor, kind: str = "") -> None:
        pass  # rank 0's values count

    def own_part(self, full: Tensor) -> Tensor:
        return full.narrow(0, 0, len(full) // self.world_size)

    def all_gather(self, full: Tensor, kind: str = "", own: Tensor | None = None) -> FakePending:
        self.gathers += 1
        self.sends = own
        full[0 if own is not None else len(full) // self.world_size :] = torch.nan  # until the parts arrive
        return FakePending(self, full)


class Bench:
    """A unit of one parameter, brought into a state by events alone."""

    def __init__(self, state: UnitState) -> None:
        self.comm, self.node = FakeComm(RANKS), FakeComm(OF_NODE)
        self.plain = nn.Parameter(VALUES.clone())
        self.module = nn.Module()
        self.module.weight = self.plain
        sharding: Any = self.comm
        node: Any = self.node
        self.unit = Unit("layer", self.module, [self.module], node, keep=False)
        (layout,) = build_layout({0: len(VALUES)}, {0: 0}, [0], {0: 2**63}, RANKS)
        self.shard = ParamShard(torch.empty(0), 0, self.plain, "weight")
        self.flat = FlatParams(layout, [self.plain], sharding)
        self.flat.split([self.shard], backing=None)
        self.unit.flats = [self.flat]
        self.unit.registrations = [Registration(self.module, "weight", self.plain, self.shard)]
        self.unit.show(plain=False)
        if state is UnitState.GATHERED:
            self.unit.gather()
        elif state is not UnitState.SHARDED:
            self.unit.unshard()
            if state is not UnitState.UNSHARDING:
                self.unit.wait()
            if state is UnitState.NODE_SHARDED:
                self.unit.reshard(to_node=True)
        assert self.unit.state is state
        self.comm.gathers = self.node.gathers = 0

    def tell(self, event: str) -> None:
        name, _, how = event.partition(": ")
        if how == "fails":
            self.comm.fails = self.node.fails = True
            if self.unit.state is UnitState.UNSHARDING:
                with pytest.raises(CollectiveError, match="gathering unit 'layer': the others are gone"):
                    self.unit.wait()
            else:
                self.unit.wait()
            self.comm.fails = self.node.fails = False
        elif how == "to_node":
            self.unit.reshard(to_node=True)
        else:
            getattr(self.unit, name)()

    def check(self) -> None:
        """That memory and module are what the table of states says."""
        name = self.unit.state.name
        held = self.module._parameters["weight"]
        assert held is (self.plain if STATES[name, "modules hold"] == "plain" else self.shard)
        beside = STATES[name, "beside the 1/N"]
        full = self.flat.layout.numel * 4
        present = self.flat.full.untyped_storage().nbytes()
        assert present == (full if beside == "all" else 0)
        if beside == "1/k":
            assert self.flat.nbytes() == full // OF_NODE
        elif beside == "nothing":
            assert self.flat.nbytes() == 0
        if STATES[name, "modules hold"] == "plain":
            assert torch.equal(self.plain.detach(), VALUES)
            assert (self.plain.data_ptr() == self.flat.full.data_ptr()) is (beside == "all")
        assert torch.equal(self.shard.local, VALUES[: self.flat.layout.shard_numel]), "always there"


def test_the_tables_have_every_state_and_every_event():
    names = {state.name for state in UnitState}
    assert {state for state, _ in STATES} == {state for _, state in EVENTS} == names
    methods = {name for name, value in vars(Unit).items() if callable(value) and not name.startswith("_")}
    values = {"keep_edits", "moved", "written", "take_replaced", "write_back", "show"}
    calls = {"watch_parts", "unwatch_parts"}
    assert {event.partition(":")[0] for event, _ in EVENTS} == methods - values - calls
    assert {text for (_, column), text in STATES.items() if column == "modules hold"} == {"shards", "plain"}


@pytest.mark.parametrize("state", UnitState)
def test_what_is_there_in_a_state(state: UnitState):
    Bench(state).check()


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in EVENTS.items()])
def test_a_cell(event: str, before: str, after: str):
    if after == "--":
        return  # gather_parameters reshards before
    bench = Bench(UnitState[before])
    bench.tell(event)
    assert bench.unit.state is UnitState[after]
    bench.check()


@pytest.mark.parametrize(("before", "gathers"), [("SHARDED", (1, 0)), ("NODE_SHARDED", (0, 1)), ("UNSHARDED", (0, 0))])
def test_who_takes_part_in_a_gather(before: str, gathers: tuple[int, int]):
    """All ranks, or those of the node where they keep all of it. Their parts are sent from where they are."""
    bench = Bench(UnitState[before])
    bench.unit.unshard()
    assert (bench.comm.gathers, bench.node.gathers) == gathers
    if any(gathers):
        assert bench.node.sends is bench.flat._node_part if gathers[1] else bench.comm.sends is bench.flat.shard


def test_what_has_failed_to_arrive_can_be_waited_for_again():
    bench = Bench(UnitState.UNSHARDING)
    bench.tell("wait: fails")
    bench.check()
    bench.unit.wait()
    assert bench.unit.state is UnitState.UNSHARDED
    bench.check()


@pytest.mark.parametrize("state", UnitState)
def test_what_changes_values_changes_no_state(state: UnitState):
    bench = Bench(state)
    bench.unit.keep_edits(unseen=True)
    assert bench.unit.moved() == []
    if state is UnitState.GATHERED:
        assert bench.unit.written() == []
        bench.unit.write_back()
    assert bench.unit.state is state
    bench.check()


def test_a_shard_that_is_written_after_its_gather_is_gathered_again():
    """By the user, between a step and the forward that the step has gathered for."""
    for ahead, gathers in ((True, 2), (False, 1)):
        bench = Bench(UnitState.SHARDED)
        bench.unit.unshard(ahead=ahead)
        bench.shard.copy_(VALUES)
        bench.unit.wait()
        assert bench.comm.gathers == gathers
        bench.check()
