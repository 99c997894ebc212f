"""Which programs are legal. The generator and the shrinker make no others.

- ``step``, ``zero_grad``, ``clip_grad_norm_``, ``no_sync``, state dicts, ``observe``, ``close``, constructors,
  ``add_param_group`` and the scaler's calls are made by every rank in the same order (which a program's form sees to).
- A backward *reaches* an optimizer on a rank if it makes a gradient there for one of its trained parameters before it
  raises; at stage 3, if it comes to a unit in order to make one. One under ``no_sync`` may reach any ranks. One that is
  synchronised reaches all ranks or none, or else it is the only one since the last step or zeroing, and the optimizer's
  ``step`` has to follow (clipping and unscaling may come between, ``no_sync`` may not). Where every rank that it does
  not reach has raised, and the optimizer was zeroed after its last step by its own ``zero_grad``, that may follow as
  well, but at stage 0.
- At stage 0 the end of a synchronised backward waits for the other ranks. So every rank reaches the optimizers of stage
  0 in the same order; where one is reached by some ranks only, it is the only one of stage 0. While a rank may be
  waiting so (one raised, or was not reached), what follows is a call of these optimizers that completes the average, in
  that order, or a synchronised backward, and nothing else that communicates.
- At stage 3 each rank makes as many forwards and backwards as the others. The first forward (also after ``observe``)
  calls every unit once, in the same order on all ranks. So does the first that trains, and then its order holds from
  now on; or each rank calls some of the units in the first forward's order. Later ones call in any order, several
  times, but all ranks the same; or each rank some of the units, in the order that holds. A forward raises on all
  ranks or on none. No parameter is used on both sides of what raises in backward. Where a backward raises on some
  ranks before it has come to a unit there, or where it raises and units were called in another order than the one
  that holds, or twice, ``step`` has to follow, or ``zero_grad`` if it is not the first since the last: before any
  other call that communicates, as ranks wait in the gathers of that backward. It is one model, and none of stage 0 is
  in that backward's averages. A parameter that was thawed is used by every rank in the first step. After a raise a
  module's ``zero_grad`` only where every rank has a gradient: else it cannot tell.
  ``gather_parameters`` only where no raise is open.
- A closure zeroes and runs backwards, and does not raise. ``step`` with one is those calls, and then ``step``; at stage
  3 it settles first what raised before. Hooks of the optimizer clip, set a learning rate, zero after the step, or send
  something of their own. With a scaler there are neither.
- Thawing, freezing, dropping, assigning and scaling gradients happen on all ranks, where no raise is open and no rank
  was left out. What was thawed does not count as trained until ``step`` has met it. Frozen later: without a gradient.
- After a clip: no assigning. With ``max_grad_norm`` no further backward, nor ``no_sync`` block, either. After a step
  that clipped or unscaled: zero first, as gradients are then other than torch's.
- With a scaler: unscale, step and update as torch has them, once each; what is stepped has a gradient; no backward in
  between.
- Where parameters are cut, ranks of a row compute the same, each with its slices: their backwards, evaluations and
  assigned gradients are alike. At stage 3 shards of slices are not edited.
- The user's own collective: where no rank may be waiting at stage 0, and at stage 3 where nothing is open.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

from fuzz.program import (
    NO_DTENSOR,
    RULES,
    STORES,
    WHOLE,
    AddGroup,
    AllReduce,
    Arrivals,
    Assign,
    Average,
    Backward,
    Boom,
    Clip,
    Drop,
    Edit,
    Enter,
    Evaluate,
    Freeze,
    Leave,
    Load,
    LoadFull,
    Look,
    ModuleZero,
    Net,
    Observe,
    Op,
    Optim,
    Program,
    Read,
    Renew,
    Save,
    SaveFull,
    ScaleGrad,
    SetLr,
    Shape,
    Step,
    Thaw,
    Unit,
    Unscale,
    Update,
    Use,
    Zero,
    arrivals,
    flat,
)

# Where the documents can be read in two ways: what may programs do? ``--narrow NAME`` says that they may not.
OWN_COLLECTIVE_WHILE_LEFT_OUT = True  # at stages 1 and 2
CLIP_WHILE_LEFT_OUT = True
STAGE3_LEFT_OUT = True  # may a rank call the module and use no parameter, where others do?
MODULE_ZERO_BEGINS_ANEW = False  # the count of synchronised backwards: the others do not hear of it


class Illegal(Exception):
    """Why a program is none."""


def need(condition: object, reason: str) -> None:
    if not condition:
        raise Illegal(reason)


@dataclass
class _State:
    """What the law knows of an optimizer."""

    optim: Optim
    stage: int
    ranks: int
    given: set[int] = field(default_factory=set)
    groups: int = 0
    trained: set[int] = field(default_factory=set)
    requires_grad: set[int] = field(default_factory=set)
    thawed: set[int] = field(default_factory=set)  # not met by a step yet
    added: int = 0
    grads: list[set[int]] = field(default_factory=list)
    synced: int = 0
    left_out: str = ""  # "", "raise" or "skip": a synchronised backward reached some ranks only
    raised: bool = False
    zeroed: bool = False
    clipped: bool = False
    in_block: bool = False  # of no_sync
    unscaled: bool = False
    stepped: bool = False  # since the scaler's update
    spent: bool = False  # unscaled and then zeroed, since the scaler's update
    dirty: bool = False
    infinite: bool = False  # some gradient
    averaged: bool = False  # stage 0: .grad is the averaged one
    saved: bool = False
    saved_full: bool = False
    order: tuple[int, ...] | None = None  # of units
    order_trained: bool = False  # whether a forward that trains has been observed

    def __post_init__(self) -> None:
        self.given = self.optim.given
        self.groups = len(self.optim.groups)
        self.requires_grad = set(range(len(self.optim.shapes))) - set(self.optim.frozen)
        self.trained = self.given & self.requires_grad
        self.grads = [set() for _ in range(self.ranks)]

    @property
    def settled(self) -> bool:
        return not self.left_out and not self.raised

    def any_grads(self) -> set[int]:
        return set().union(*self.grads)

    def forget(self) -> None:
        """After a step or a zeroing."""
        self.synced, self.left_out, self.raised = 0, "", False
        self.averaged = False

    def cleared(self, to_none: bool) -> None:
        self.spent |= self.unscaled
        self.clipped = self.unscaled = self.dirty = False
        self.infinite = False
        if to_none:
            self.grads = [set() for _ in range(self.ranks)]


class Law:
    """Follows a program; ``apply`` raises Illegal, and is then of no further use (copy it before)."""

    def __init__(self, program: Program) -> None:
        need(program.world in (1, 2, 3, 4), "one to four ranks")
        need(program.world == 4 or not any(optim.mesh for optim in program.optims), "a mesh of four ranks")
        need(1 <= len(program.optims) <= 3, "one to three optimizers")
        self.rows = any(optim.cut for optim in program.optims)
        need(
            not self.rows or (program.world == 4 and len(program.optims) == 1), "slices on four ranks, of one optimizer"
        )
        self.world = program.world
        self.scaler = program.scale is not None
        self.waiting: list[int] = []  # optimizers of stage 0 for which a rank may be waiting at the end of its backward
        self.gathering: list[int] = []  # those of stage 3 for which one may be waiting in the gathers of its backward
        self.scaled_steps = 0
        for optim in program.optims:
            _well_formed(optim)
        self.states = [_State(optim, optim.stage, program.world) for optim in program.optims]

    def trainable(self, o: int, p: int) -> bool:
        return p in self.states[o].requires_grad

    def apply(self, op: Op) -> None:
        o = getattr(op, "o", None)
        if o is not None:
            need(0 <= o < len(self.states), "no such optimizer")
        p = getattr(op, "p", None)
        if p is not None:
            need(0 <= p < len(self.states[o].optim.shapes), "no such parameter")
        if self.rows and (of_ranks := getattr(op, "ranks", None)) is not None:
            need(len(of_ranks) == 4 and of_ranks[::2] == of_ranks[1::2], "ranks of a row differ")
        getattr(self, f"_{type(op).__name__.lower()}")(op)

    def end(self) -> None:
        """Everything is closed; at stage 3 it is read before."""
        need(not self.waiting and not self.gathering, "a rank may be waiting")
        for state in self.states:
            need(not state.left_out, "step has to follow")
            need(state.stage != 3 or not state.raised, "a raise is open, and stage 3 is read")
            need(not state.in_block, "a block that does not end")

    # Backward

    def _backward(self, op: Backward) -> None:
        blocks = (o for o, state in enumerate(self.states) if state.in_block and o not in op.no_sync)
        op = replace(op, no_sync=(*op.no_sync, *blocks))
        need(op.roots in (1, 2, 3), "one to three roots")
        need(len(op.ranks) == self.world, "a chain for each rank")
        need(len(set(op.no_sync)) == len(op.no_sync), "twice in no_sync")
        need(all(0 <= o < len(self.states) for o in op.no_sync), "no such optimizer")
        need(not self.gathering, "a rank waits in the gathers of a backward")
        self._chains(op)
        came = [arrivals(chain, self.trainable) for chain in op.ranks]
        raised = [bool(a.raised) for a in came]
        if any(raised):
            need(not any(s.thawed for s in self.states), "no raise while something is thawed")
        for o, state in enumerate(self.states):
            if any(a.of(o) for a in came):
                need(not state.unscaled, "a backward after unscale_")
                need(not state.dirty, "a backward onto clipped gradients that were stepped with")
            if any(a.of(o) for a in came) or o in op.no_sync:
                need(not (state.clipped and state.optim.max_grad_norm is not None), "max_grad_norm after a lost clip")
        need(not any(self.states[o].left_out for o in op.no_sync), "no no_sync after some ranks were left out")
        if set(op.no_sync) & set(self.waiting):
            need(self.waiting == [op.no_sync[0]], "a rank may be waiting, at stage 0")
            self.waiting = []
        left_before = [bool(state.left_out) for state in self.states]
        synchronised = [o for o in range(len(self.states)) if o not in op.no_sync]
        for o in synchronised:
            self._synchronised(self.states[o], o, op, came, raised)
        called = [link.o for link in op.ranks[0] or () if isinstance(link, Net)]  # the same on all ranks
        for o in reversed(called):  # a raise leaves units to be gathered: under no_sync, and before the first gradient
            need(not left_before[o], "at stage 3 step has to follow before another forward")
            self.states[o].raised = any(raised)
            early = [_raises_before_units(chain, o) for chain in op.ranks]
            again = any(raised) and any(self._again(chain, o) for chain in op.ranks)
            if again or (any(early) and not all(early)):
                self.gathering.append(o)
                self.states[o].left_out = self.states[o].left_out or "raise"
        self._stage_zero(synchronised, came, raised)
        need(not (self.waiting and self.gathering), "ranks may be waiting at stage 0, and at stage 3")
        need(len(self.gathering) < 2, "ranks may be waiting in the gathers of several models")
        for o, state in enumerate(self.states):
            if any(a.of(o) for a in came) or o in op.no_sync:
                state.clipped = False
                state.infinite |= any(abs(c) == math.inf for a in came for q, _, c in a.grads if q == o)
                if o in op.no_sync:
                    state.averaged = False
            for rank, a in enumerate(came):
                state.grads[rank].update(a.of(o))

    def _again(self, chain: tuple[object, ...] | None, o: int) -> bool:
        """Whether units are called in another order than the first forward's, or twice: backward goes round again."""
        order = self.states[o].order
        if order is None:  # a forward has raised before it came here
            return False
        nets = [link for link in chain or () if isinstance(link, Net) and link.o == o]
        places = [order.index(link.k) for net in nets for link in net.links if isinstance(link, Unit)]
        return any(a >= b for a, b in itertools.pairwise(places))

    def _synchronised(self, state: _State, o: int, op: Backward, came: list[Arrivals], raised: list[bool]) -> None:
        if state.stage == 3:
            reached = [_comes_to_units(chain, o, state.trained) for chain in op.ranks]
        else:
            reached = [bool(set(a.of(o)) & state.trained) for a in came]
        if not any(reached):
            need(not any(a.of(o) for a in came), "only what was thawed is reached")
            return
        need(not state.left_out, "step has to follow")
        if all(reached):
            state.synced += 1
            state.raised = any(raised)
            state.averaged = not state.raised
            return
        need(state.stage != 3 or STAGE3_LEFT_OUT, "a rank is left out at stage 3")
        need(not state.synced, "one of several synchronised backwards reaches some ranks only")
        need(not state.thawed, "some ranks only, while something is thawed")
        state.synced, state.averaged = 1, False
        state.left_out = "raise" if all(r for r, to in zip(raised, reached, strict=True) if not to) else "skip"

    def _stage_zero(self, synchronised: list[int], came: list[Arrivals], raised: list[bool]) -> None:
        zero = [o for o in synchronised if self.states[o].stage == 0]
        orders = []
        for a in came:
            orders.append(list(dict.fromkeys(o for o, p, _ in a.grads if o in zero and p in self.states[o].trained)))
        met = set().union(*map(set, orders))
        if not met:
            return
        same = all(order == orders[0] for order in orders)
        need(same or len(met) == 1, "the optimizers of stage 0 in different orders")
        order = orders[0] if same else list(met)
        if self.waiting:
            need(same and order == self.waiting, "not those of stage 0 that are waited for")
        self.waiting = order if not same or (any(raised) and not all(raised)) else []
        if self.waiting and not same:
            need(sum(bool(s.left_out) for s in self.states) == 1, "several left out, and one of stage 0")

    def _chains(self, op: Backward) -> None:
        nets: list[list[Net]] = []
        for chain in op.ranks:
            for link in chain or ():
                if isinstance(link, Use):
                    self._usable(link.o, link.p)
                    need(self.states[link.o].stage != 3, "stage 3 is used through its module")
            nets.append([link for link in chain or () if isinstance(link, Net)])
        orders = [[net.o for net in rank] for rank in nets]
        need(all(order == orders[0] for order in orders), "another number of forwards, or another order")
        need(len(set(orders[0])) == len(orders[0]), "a module twice")
        forward = [_before_raise(chain) for chain in op.ranks]
        if orders[0]:
            need(not self.waiting, "a rank may be waiting, and units are gathered")
            need(all(f == forward[0] for f in forward), "a forward raises on some ranks only, or elsewhere")
        for i in range(len(orders[0]) if forward[0] is None else forward[0]):
            self._forward([rank[i] for rank in nets], trains=True)
        for i in range(len(orders[0])):
            for rank in nets:
                self._parts(rank[i])
        for chain in op.ranks:
            self._one_side(chain)

    def _usable(self, o: int, p: int) -> None:
        need(0 <= o < len(self.states), "no such optimizer")
        need(0 <= p < len(self.states[o].optim.shapes), "no such parameter")
        need(p in self.states[o].given, "used before it is given")

    def _parts(self, net: Net) -> None:
        state = self.states[net.o]
        need(state.stage == 3, "not a module")
        for link in net.links:
            if isinstance(link, Use):
                need(link.o == net.o, "another's parameter")
                self._usable(link.o, link.p)
                need(state.optim.units[link.p] == -1, "not the root's")
            elif isinstance(link, Unit):
                need(0 <= link.k < state.optim.unit_count, "no such unit")
                for p, _ in link.uses:
                    self._usable(net.o, p)
                    need(state.optim.units[p] == link.k, "not the unit's")
            else:
                need(not link.forward, "a forward raises outside of the module")

    def _forward(self, nets: list[Net], *, trains: bool) -> None:
        state = self.states[nets[0].o]
        calls = [tuple(link.k for link in net.links if isinstance(link, Unit)) for net in nets]
        same = all(c == calls[0] for c in calls)
        all_once = same and sorted(calls[0]) == list(range(state.optim.unit_count))
        first = trains and not state.order_trained
        need(all_once or state.order is not None, "the first forward calls all")
        if all_once and (first or state.order is None):
            state.order = calls[0]
        elif first or not same:
            for call in calls:
                places = [state.order.index(k) for k in call]
                need(all(a < b for a, b in zip(places, places[1:], strict=False)), "another order on a rank")
        state.order_trained |= trains

    def _one_side(self, chain: tuple[object, ...] | None) -> None:
        """At stage 3 a unit called twice might have given one of its two gradients before a raise."""
        sides: list[set[tuple[int, int]]] = [set()]
        for link in chain or ():
            for inner in link.links if isinstance(link, Net) else (link,):
                if isinstance(inner, Boom):
                    sides.append(set())
                elif isinstance(link, Net):
                    used = [inner.p] if isinstance(inner, Use) else [p for p, _ in inner.uses]
                    sides[-1].update((link.o, p) for p in used)
        need(sum(map(len, sides)) == len(set().union(*sides)), "a parameter on both sides of a raise")

    def _evaluate(self, op: Evaluate) -> None:
        need(len(op.ranks) == self.world and len({net.o for net in op.ranks}) == 1, "a forward for each rank")
        need(not self.waiting and not self.gathering, "a rank may be waiting")
        for net in op.ranks:
            need(0 <= net.o < len(self.states), "no such optimizer")
            self._parts(net)
            need(not any(isinstance(link, Boom) for link in net.links), "no raise in an evaluation")
        need(self.states[op.ranks[0].o].settled, "something is open")
        self._forward(list(op.ranks), trains=False)

    # The optimizer's calls

    def _enter(self, op: Enter) -> None:
        need(not self._still(op.o).in_block, "a block within a block")
        self.states[op.o].in_block = True

    def _leave(self, op: Leave) -> None:
        need(self.states[op.o].in_block, "no block")
        self.states[op.o].in_block = False

    def _collective(self, o: int) -> None:
        """A call that settles what is open for an optimizer."""
        if self.gathering:
            need(self.gathering[0] == o, "a rank waits in the gathers of another model")
            self.gathering.pop(0)
        if self.waiting:
            need(self.waiting[0] == o, "a rank may be waiting for another optimizer")
            self.waiting.pop(0)

    def _step(self, op: Step) -> None:
        need(not self.scaler or not op.inner, "a closure or a hook with the scaler")
        for kinds, of in ((Clip | SetLr | AllReduce, op.before), (Zero | SetLr | AllReduce, op.after)):
            need(all(isinstance(inner, kinds) for inner in of), "not in a hook")
        need(all(getattr(inner, "o", op.o) == op.o for inner in op.inner), "another optimizer's")
        for inner in op.before:
            self.apply(inner)
        if op.closure:
            self._closure(op)
        self._update_of(op.o)
        for inner in op.after:
            self.apply(inner)

    def _closure(self, op: Step) -> None:
        state = self.states[op.o]
        if state.stage == 3:  # what raised before it is settled
            self._collective(op.o)
            state.left_out, state.raised = "", False
        for inner in op.closure:
            need(isinstance(inner, Zero | ModuleZero | Backward), "not in a closure")
            raises = isinstance(inner, Backward) and any(
                arrivals(chain, self.trainable).raised for chain in inner.ranks
            )
            need(not raises, "a closure raises")
            self.apply(inner)

    def _update_of(self, o: int) -> None:
        state = self.states[o]
        self._collective(o)
        need(not state.dirty, "stepped, clipped and not zeroed")
        if self.scaler:
            need(state.any_grads() & state.requires_grad, "the scaler steps what has a gradient")
            need(not state.stepped, "stepped before the scaler's update")
            need(not state.spent, "unscaled and zeroed before the scaler's update")
            state.stepped = True
            self.scaled_steps += 1
        if state.stage == 3:
            need(all(p in g for p in state.thawed for g in state.grads), "every rank uses what was thawed")
        state.trained |= state.thawed
        state.thawed = set()
        altered = state.clipped or self.scaler or state.optim.max_grad_norm is not None
        state.dirty = bool(altered and state.any_grads())
        state.clipped = state.unscaled = False
        averaged = state.averaged
        state.forget()
        state.averaged = averaged and state.stage == 0
        state.zeroed = False

    def _zero(self, op: Zero) -> None:
        state = self.states[op.o]
        self._collective(op.o)
        need(state.left_out != "skip", "step has to follow")
        need(not state.left_out or state.stage != 0, "at stage 0 the others wait for the average")
        need(state.left_out != "raise" or state.zeroed, "step has to follow: it was not zeroed since the last")
        state.cleared(op.to_none)
        state.forget()
        state.zeroed = True

    def _modulezero(self, op: ModuleZero) -> None:
        state = self.states[op.o]
        need(not state.left_out, "step has to follow")
        need(not state.unscaled or state.stage == 0, "the optimizer does not hear of it: unscale_ stays noted")
        need(not (state.clipped and state.infinite), "the coefficient is not finite")
        seen = state.stage != 3 or not state.raised or all(state.grads)
        need(seen, "zeroed where a rank has no gradient: it cannot tell")
        raised, synced, clipped = state.raised, state.synced, state.clipped
        state.cleared(op.to_none)
        state.clipped = clipped  # the optimizer does not hear of it
        state.forget()
        state.raised = raised  # its round is still to be completed
        if not MODULE_ZERO_BEGINS_ANEW:
            state.synced = synced

    def _clip(self, op: Clip) -> None:
        state = self.states[op.o]
        self._collective(op.o)
        need(not state.dirty, "stepped, clipped and not zeroed")
        need(not state.left_out or CLIP_WHILE_LEFT_OUT, "step has to follow")
        need(not state.thawed, "clipping what step has not met")
        if op.params is not None:
            need(op.params and set(op.params) <= state.given, "parameters of this optimizer")
            need(len(set(op.params)) == len(op.params), "twice")
        state.clipped = True
        state.synced += 1  # it has completed a round: a synchronised backward that follows is one of several

    def _unscale(self, op: Unscale) -> None:
        state = self.states[op.o]
        if state.stage == 0:  # else it is noted, and nothing is communicated
            self._collective(op.o)
        need(self.scaler, "no scaler")
        need(not (state.unscaled or state.stepped or state.spent), "unscaled or stepped since the update")
        need(not state.clipped and not state.dirty, "clipped before")
        need(not state.left_out or CLIP_WHILE_LEFT_OUT, "step has to follow")
        need(not state.thawed, "unscaling what step has not met")
        need(state.any_grads() & state.requires_grad, "the scaler needs a gradient")
        state.unscaled = True
        state.synced += 1  # at stage 0 it has completed a round

    def _update(self, op: Update) -> None:
        need(self.scaler and self.scaled_steps, "no step since the last update")
        need(not self.waiting and not self.gathering, "a rank may be waiting")
        for state in self.states:
            need(not state.unscaled and not state.spent, "unscaled and not stepped")
            state.stepped = False
        self.scaled_steps = 0

    def _still(self, o: int) -> _State:
        """For what completes a backward that raised, but does not stand in for a step."""
        self._collective(o)
        need(not self.states[o].left_out, "step has to follow")
        return self.states[o]

    def _save(self, op: Save) -> None:  # communicates nothing, and so completes nothing
        need(not self.states[op.o].left_out, "step has to follow")
        self.states[op.o].saved = True

    def _savefull(self, op: SaveFull) -> None:
        self._still(op.o).saved_full = True

    def _average(self, op: Average) -> None:
        need(self._still(op.o).optim.ema_decay is not None, "there is none")
        need(not self.waiting and not self.gathering, "a rank may be waiting")

    def _load(self, op: Load) -> None:
        need(self._still(op.o).saved, "nothing saved")
        need(not self.states[op.o].any_grads(), "gradients may be dropped")

    def _loadfull(self, op: LoadFull) -> None:
        need(self._still(op.o).saved_full, "nothing saved")

    def _observe(self, op: Observe) -> None:
        state = self._still(op.o)
        state.order, state.order_trained = None, False

    def _setlr(self, op: SetLr) -> None:
        need(0 <= op.group < self.states[op.o].groups, "no such group")

    def _renew(self, op: Renew) -> None:
        state = self._still(op.o)
        need((op.stage == 3) == (state.stage == 3) and op.stage in range(4), "another kind of stage")
        need(not (state.unscaled or state.stepped or state.spent), "the scaler knows the old one")
        state.cleared(True)
        state.forget()
        state.zeroed = state.saved = False
        state.saved_full &= state.trained == state.given & state.requires_grad  # it loads anywhere
        state.trained, state.thawed = state.given & state.requires_grad, set()
        need(state.trained, "nothing to train")
        need(op.store in STORES, "no such store")
        state.stage = op.stage

    def _addgroup(self, op: AddGroup) -> None:
        state = self._still(op.o)
        need(state.added < len(state.optim.late), "no group left")
        need(not state.unscaled, "a group after unscale_")
        state.given |= set(state.optim.late[state.added].params)
        state.trained |= set(state.optim.late[state.added].params) & state.requires_grad
        state.added += 1
        state.groups += 1
        state.saved = state.saved_full = False

    # What is done to parameters and gradients

    def _quiet(self, o: int) -> _State:
        need(self.states[o].settled, "something is open")
        return self.states[o]

    def _thaw(self, op: Thaw) -> None:
        state = self._quiet(op.o)
        need(op.p in state.given and op.p not in state.requires_grad, "not frozen")
        need(not state.unscaled and not state.clipped, "thawed after a clip")
        state.requires_grad.add(op.p)
        if op.p not in state.trained:
            state.thawed.add(op.p)
        state.saved = state.saved_full = False

    def _freeze(self, op: Freeze) -> None:
        state = self._quiet(op.o)
        need(state.stage != 3, "freezing a shard")
        need(op.p in state.trained & state.requires_grad, "not trained")
        need(op.p not in state.any_grads() and not state.synced, "frozen with a gradient")
        need(len(state.trained & state.requires_grad) > 1, "the last one that is trained")
        state.requires_grad.discard(op.p)
        state.saved = state.saved_full = False

    def _edit(self, op: Edit) -> None:
        state = self._quiet(op.o)
        need(op.p in state.given, "not given yet")
        need(state.stage != 3 or not (self.waiting or self.gathering), "a rank may be waiting")
        need(state.stage != 3 or not self.rows, "editing shards of slices")
        need(state.stage != 3 or (op.p in state.requires_grad and not state.synced), "between steps")

    def _drop(self, op: Drop) -> None:
        state = self._quiet(op.o)
        need(op.p in state.trained & state.requires_grad, "not trained")
        need(not state.dirty, "stepped, clipped and not zeroed")
        need(not (state.clipped and state.infinite), "the coefficient is not finite")
        for grads in state.grads:
            grads.discard(op.p)

    def _assign(self, op: Assign) -> None:
        state = self._quiet(op.o)
        need(op.p in state.trained & state.requires_grad, "not trained")
        need(not state.clipped and not state.unscaled and not state.dirty, "assigned after a clip")
        need(state.stage != 3, "assigning to a shard")
        need(not self.scaler or state.optim.dtype == "float32", "16 bits do not hold it beside scaled gradients")
        need(len(op.ranks) == self.world, "a gradient for each rank")
        for grads in state.grads:
            grads.add(op.p)
        state.averaged = False

    def _scalegrad(self, op: ScaleGrad) -> None:
        state = self._quiet(op.o)
        need(state.stage == 0 and state.averaged, "the averaged gradient is not there")
        need(op.p in state.any_grads() & state.trained & state.requires_grad, "no gradient")
        need(not state.clipped and not state.dirty and not state.unscaled, "edited after a clip")

    def _allreduce(self, op: AllReduce) -> None:
        need(not self.waiting and not self.gathering, "a rank may be waiting")
        for state in self.states:
            need(state.stage != 3 or state.settled, "something is open at stage 3")
            need(not state.left_out or OWN_COLLECTIVE_WHILE_LEFT_OUT, "step has to follow")

    def _look(self, op: Look) -> None:
        need(self._quiet(op.o).stage != 3, "parameters are shards")

    def _read(self, op: Read) -> None:
        need(self._quiet(op.o).stage == 3, "not sharded")
        need(not self.waiting and not self.gathering, "a rank may be waiting")


def _well_formed(optim: Optim) -> None:
    every = [p for group in (*optim.groups, *optim.late) for p in group.params]
    need(optim.shapes and optim.groups and all(group.params for group in (*optim.groups, *optim.late)), "empty")
    need(sorted(every) == list(range(len(optim.shapes))), "each parameter in one group")
    need(set(optim.frozen) <= set(range(len(optim.shapes))), "no such parameter")
    need(optim.given - set(optim.frozen), "nothing to train")
    need(optim.store in STORES, "no such store")
    _rules_fit(optim)
    if optim.cut:
        need(not optim.mesh and len(optim.cut) == len(optim.shapes), "a cut for each parameter, of one dimension")
        places = zip(optim.cut, optim.shapes, strict=True)
        need(all(dim in (WHOLE, NO_DTENSOR) or 0 <= dim < len(shape) for dim, shape in places), "no such dimension")
        need(any(optim.cut[p] != NO_DTENSOR for p in optim.given), "no DTensor among those given")
    if optim.stage == 3:
        need(not optim.late, "stage 3 is given everything")
        need(len(optim.units) == len(optim.shapes), "a unit for each parameter")
        need(set(optim.units) - {-1} == set(range(optim.unit_count)) and optim.unit_count, "units in a row")


def fits(shape: Shape, view: tuple[str, int]) -> bool:
    """Whether a view cuts the matrices of this shape: of a stack, or of a convolution, [out, the rest]."""
    rows, columns = shape[-2:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))
    return (rows if view[0] == "rows" else columns) % view[1] == 0


def _rules_fit(optim: Optim) -> None:
    need(optim.rules <= {*RULES}, "no such rule")
    classes = {RULES[rule][0] for rule in optim.rules}
    need(len(classes) == len(optim.rules), "what decides the state of a rule is the same in all of its groups")
    for group in (*optim.groups, *optim.late):
        muon = optim.rule_of(group) == "muon"
        need(muon or group.view is None, "a view is Muon's")
        for shape in [optim.shapes[p] for p in group.params] if muon else []:
            need(2 <= len(shape) <= 5, "no matrix")
            need(group.view is None or fits(shape, group.view), "a view that does not fit")
    if "muon" in optim.rules:
        need(not optim.cut, "a slice of a matrix")


def _raises_before_units(chain: tuple[object, ...] | None, o: int) -> bool:
    """Whether backward raises before it comes to a unit, the root included: behind the net in the chain."""
    net = next((place for place, link in enumerate(chain or ()) if isinstance(link, Net) and link.o == o), None)
    if chain is None or net is None:
        return False
    behind = [inner for link in chain[net + 1 :] for inner in (link.links if isinstance(link, Net) else (link,))]
    return any(isinstance(link, Boom) and not link.forward for link in behind)


def _comes_to_units(chain: tuple[object, ...] | None, o: int, trained: set[int]) -> bool:
    """Whether backward comes to a unit, in order to make gradients of what is trained; it may raise before it does."""
    used = {p for kind, other, p, _ in flat(chain) if kind == "use" and other == o}
    called = any(isinstance(link, Net) and link.o == o for link in chain or ())
    return called and _before_raise(chain) is None and bool(used & trained) and not _raises_before_units(chain, o)


def _before_raise(chain: tuple[object, ...] | None) -> int | None:
    """How many modules are called before a forward raises; None: it does not."""
    nets = 0
    for link in chain or ():
        if isinstance(link, Boom) and link.forward:
            return nets
        nets += isinstance(link, Net)
    return None


def why_not(program: Program, ends: bool = True) -> str | None:
    """Why a program is not legal; None: it is. ``ends``: it is to be whole."""
    try:
        law = Law(program)
        for op in program.ops:
            law.apply(op)
        if ends:
            law.end()
    except Illegal as reason:
        return str(reason)
    return None
