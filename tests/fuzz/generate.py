"""Random legal programs: operations are drawn one after another, and drawn again where the law forbids one."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fuzz.law import Illegal, Law, fits, why_not
from fuzz.program import (
    NO_DTENSOR,
    STORES,
    WHOLE,
    AddGroup,
    AllReduce,
    Assign,
    Average,
    Backward,
    Boom,
    Clip,
    Drop,
    Edit,
    Evaluate,
    Freeze,
    Group,
    Link,
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
)

SHAPES: tuple[Shape, ...] = ((1,), (5,), (128,), (130,), (257,), (300,), (16, 16), (7, 19), (40, 10), (600,))
MATRICES: tuple[Shape, ...] = (
    (1, 5),
    (5, 7),
    (7, 19),
    (8, 20),
    (40, 4),
    (17, 60),
    (20, 60),
    (58, 17),
    (3, 5, 7),
    (4, 4, 2, 2),
)
"""Of full rank with the gradients that programs have: else a direction would be no more than noise."""
ALONE_RULES = ("", "amsgrad", "nesterov", "sgd")
COEFFICIENTS = (-2.0, -1.5, -1.0, -0.5, 0.25, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Flavour:
    """What programs are about."""

    stages: tuple[int, ...]
    optims: tuple[int, ...]
    raises: float = 0.0  # of backwards
    scaler: float = 0.1  # of programs
    infinite: float = 0.0  # of backwards
    mesh: float = 0.0  # how often an optimizer has a mesh of two replicas, on four ranks
    left_out: float = 1.5  # how often ranks are left out: a weight; the others' sum is 10
    # What came later is not in the text that seeds a program: the programs of the flavours before stay the same.
    shapes: tuple[Shape, ...] = field(default=SHAPES, repr=False)
    alone: float = field(default=0.0, repr=False)  # how often on one rank
    steps: bool = field(default=False, repr=False)  # whether programs begin with steps, and something between
    stores: bool = field(default=False, repr=False)  # of the state: off the device
    slices: bool = field(default=False, repr=False)  # parameters are cut over two tensor-parallel ranks, of four
    rules: bool = field(default=False, repr=False)  # other than AdamW, and averages
    split: bool = field(default=False, repr=False)  # masters, of bf16 parameters
    groups: bool = field(default=False, repr=False)  # have rules of their own, Muon among them


PLAIN = Flavour(stages=(0, 1, 2), optims=(1,), raises=0.08, infinite=0.03)
STAGE3 = Flavour(stages=(3,), optims=(1,), raises=0.08, infinite=0.02)
SEVERAL = Flavour(stages=(0, 1, 2, 2), optims=(2, 2, 3), raises=0.2)
MIXED = Flavour(stages=(0, 1, 2, 3), optims=(1, 2, 2, 3), raises=0.15, infinite=0.05)
SHARDED = Flavour(stages=(3,), optims=(2, 2, 3), raises=0.15)
STRAIGHT = Flavour(stages=(0, 1, 2), optims=(1,), infinite=0.03, left_out=0)  # nothing raises, no rank is left out
EMPTY = Flavour((0, 1, 2), (1,), raises=0.02, shapes=(*SHAPES[:4], (0,), (3, 0)))
ALONE = replace(EMPTY, raises=0.03, alone=1.0)
STEPS = Flavour((0, 1, 2), (1,), raises=0.03, alone=0.2, shapes=EMPTY.shapes, steps=True)
STORED = Flavour(
    (0, 1, 2, 2, 3, 3), (1, 1, 1, 2), raises=0.05, infinite=0.05, scaler=0.2, alone=0.25, steps=True, stores=True
)
GRIDS = Flavour(stages=(1, 2, 2, 3, 3), optims=(1, 1, 2), raises=0.12, infinite=0.03, mesh=0.8)
RULED = Flavour((0, 1, 2, 2, 3), (1, 1, 2), raises=0.04, infinite=0.04, scaler=0.15, steps=True, rules=True)
SPLIT = replace(RULED, infinite=0.05, split=True)
GROUPS = Flavour((0, 1, 2, 2, 3, 3), (1, 1, 2), raises=0.07, infinite=0.04, scaler=0.15, steps=True, groups=True)
SLICES = Flavour(stages=(0, 1, 2, 3), optims=(1,), raises=0.08, infinite=0.03, slices=True)
FLAVOURS = {
    "straight": STRAIGHT,
    "plain": PLAIN,
    "stage3": STAGE3,
    "several": SEVERAL,
    "mixed": MIXED,
    "sharded": SHARDED,
    "grids": GRIDS,
    "empty": EMPTY,
    "alone": ALONE,
    "slices": SLICES,
    "steps": STEPS,
    "stored": STORED,
    "ruled": RULED,
    "split": SPLIT,
    "groups": GROUPS,
}


def program(seed: int, flavour: Flavour) -> Program:
    """The same for the same arguments."""
    return _Generator(random.Random(f"{seed} {flavour}"), flavour).program()


class _Generator:
    def __init__(self, rng: random.Random, flavour: Flavour) -> None:
        self.rng, self.flavour = rng, flavour

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def program(self) -> Program:
        rng = self.rng
        alone = self.flavour.alone and self.chance(self.flavour.alone)
        four = self.flavour.mesh or self.flavour.slices
        world = 4 if four else 1 if alone else 3 if self.chance(0.2) else 2
        scaler = self.chance(self.flavour.scaler)
        dtype = "bfloat16" if self.chance(0.6 if self.flavour.stores else 0.12) else "float32"
        if scaler:
            dtype = rng.choice(("float16", "float16", "float32"))
        dtype = "bfloat16" if self.flavour.split else dtype
        optims = tuple(self.optim(world, dtype) for _ in range(rng.choice(self.flavour.optims)))
        start = Program(world, optims, scale=1024.0 if scaler else None)
        law = Law(start)
        ops: list[Op] = []
        draws = [self.draw] * rng.choice((3, 5, 7, 9, 12, 16, 22))
        if self.flavour.steps:
            ordinary = [self.whole_backward, self.between, self.between, self.steps, self.between]
            draws = ordinary * rng.choice((2, 3, 4, 5)) + draws
        for draw in draws:
            for _ in range(40):
                drawn = draw(start, law)
                after = copy.deepcopy(law)
                try:
                    for op in drawn:
                        after.apply(op)
                except Illegal:
                    continue
                law, ops = after, [*ops, *drawn]
                break
        return self.ended(replace(start, ops=tuple(ops)))

    def ended(self, made: Program) -> Program:
        """With the steps at the end that the law asks for; without its last operations, where that is not possible."""
        while (longer := self.settled(made)) is None:
            made = replace(made, ops=made.ops[:-1])
        return longer

    def settled(self, made: Program) -> Program | None:
        law = Law(made)
        for op in made.ops:
            law.apply(op)
        for _ in range(6):
            if why_not(made) is None:
                return made
            o = next(iter(law.waiting or (k for k, state in enumerate(law.states) if not state.settled)))
            longer = [replace(made, ops=(*made.ops, op)) for op in (Step(o), Zero(o))]
            legal = [program for program in longer if why_not(program, ends=False) is None]
            if not legal:
                return None
            made = legal[0]
            law.apply(made.ops[-1])
        return None

    def optim(self, world: int, dtype: str) -> Optim:
        rng = self.rng
        stage = rng.choice(self.flavour.stages)
        count = rng.choice((1, 2, 3, 4, 6))
        if stage == 3:
            count = max(count, 2)
        shapes = tuple(rng.choice(self.flavour.shapes) for _ in range(count))
        frozen = tuple(p for p in range(1, count) if self.chance(0.1))
        order = list(range(count))
        late: tuple[Group, ...] = ()
        if stage != 3 and count > 2 and self.chance(0.25):
            late = (Group((order.pop(),), *self.options()),)
        cut = rng.randrange(1, len(order)) if len(order) > 1 and self.chance(0.3) else len(order)
        groups = tuple(Group(tuple(part), *self.options()) for part in (order[:cut], order[cut:]) if part)
        units: tuple[int, ...] = ()
        if stage == 3:
            used = rng.randint(1, min(4, count))
            root = 0 if used == count or self.chance(0.4) else 1
            drawn = [*range(used), *(rng.randrange(-root, used) for _ in range(count - used))]
            rng.shuffle(drawn)
            units = tuple(drawn)
        reduce_dtype = "float32" if self.chance(0.15) or (dtype == "bfloat16" and world > 2) else None
        made = Optim(
            shapes=shapes,
            stage=stage,
            groups=groups,
            late=late,
            frozen=frozen,
            units=units,
            dtype=dtype,
            bucket_cap_mb=rng.choice((0.001, 0.002, 0.002, 0.004, 25.0)),
            overlap_grad_reduce=not self.chance(0.2),
            grad_reduce_dtype=reduce_dtype,
            max_grad_norm=rng.choice((0.5, 4.0)) if self.chance(0.1) else None,
            prefetch=rng.choice((0, 1, 1, 2)),
            reshard_after_forward=not self.chance(0.2),
            mesh=bool(self.flavour.mesh) and self.chance(self.flavour.mesh),
            cut=self.cuts(shapes, groups) if self.flavour.slices else (),
            store=self.store(),
            param_offload=self.flavour.stores and stage == 3 and self.chance(0.5),
            rule=rng.choice(ALONE_RULES) if self.flavour.rules else "",
            ema_decay=rng.choice((None, 0.5, 0.75)) if self.flavour.rules else None,
            split=rng.choice(("split", "split8")) if self.flavour.split else "",
        )
        return self.with_rules(made) if self.flavour.groups else made

    def with_rules(self, optim: Optim) -> Optim:
        """The same with rules by group, of which one of each kind, and with matrices where Muon is."""
        rng = self.rng
        order = [p for group in optim.groups for p in group.params]
        late = optim.late
        if optim.stage != 3 and not late and len(order) > 1 and self.chance(0.3):
            late = (Group((order.pop(),)),)
        cuts = sorted(rng.sample(range(1, len(order)), min(len(order) - 1, rng.choice((0, 1, 1, 2)))))
        parts = [order[a:b] for a, b in itertools.pairwise((0, *cuts, len(order)))]
        allowed = ["muon", "lion", rng.choice(("", "amsgrad")), rng.choice(("nesterov", "sgd"))]
        rule = rng.choice(allowed)
        shapes = list(optim.shapes)

        def group(params: Sequence[int]) -> Group:
            own = rng.choice((None, "muon", *allowed))
            if "muon" in (own, rule if own is None else own):
                return self.of_matrices(params, own, shapes)
            return Group(tuple(params), *self.options(), own)

        groups = tuple(group(part) for part in parts)
        late = tuple(group(given.params) for given in late)
        made = replace(optim, shapes=tuple(shapes), groups=groups, late=late, rule=rule)
        store = rng.choice((*STORES,)) if self.chance(0.3) else ""
        return replace(made, store=store, ema_decay=0.5 if self.chance(0.2) else None)

    def of_matrices(self, params: Sequence[int], rule: str | None, shapes: list[Shape]) -> Group:
        """A group of Muon's, with a view now and then that fits all of it."""
        view = self.rng.choice((None, None, None, ("rows", 2), ("columns", 2), ("rows", 4)))
        fitting = [shape for shape in MATRICES if view is None or fits(shape, view)]
        for p in params:
            shapes[p] = self.rng.choice(fitting)
        lr, decay = self.rng.choice((0.5, 1.0)), self.rng.choice((0.0, 0.25))
        return Group(tuple(params), lr, decay, rule, view)

    def store(self) -> str:
        if self.flavour.rules and self.chance(0.4):
            return self.rng.choice((*STORES,))
        return self.rng.choice(("cpu", "cpu", "nvme", *STORES)) if self.flavour.stores else ""

    def cuts(self, shapes: tuple[Shape, ...], groups: tuple[Group, ...]) -> tuple[int, ...]:
        """One at least of those given at first is a DTensor."""
        drawn = [
            self.rng.choice((*range(len(shape)), *range(len(shape)), WHOLE, WHOLE, NO_DTENSOR)) for shape in shapes
        ]
        first = groups[0].params[0]
        drawn[first] = max(drawn[first], WHOLE)
        return tuple(drawn)

    def on_rows(self, ranks: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for both ranks of a row, where parameters are cut."""
        return tuple(ranks[rank - rank % 2] for rank in range(len(ranks))) if self.flavour.slices else ranks

    def options(self) -> tuple[float, float]:
        return self.rng.choice((0.125, 0.125, 0.25, 0.0625)), self.rng.choice((0.0, 0.0, 0.25))

    # Operations

    def draw(self, start: Program, law: Law) -> list[Op]:
        o = self.rng.randrange(len(law.states))
        state = law.states[o]
        rare = self.rare(law, o)
        common: list[tuple[float, Callable[[], list[Op]]]] = [
            (6.0, lambda: [self.backward(law)]),
            (3.0 if state.any_grads() else 0.3, lambda: [Step(o)]),
            (1.0, lambda: [Zero(o, not self.chance(0.3))]),
            (0.8, lambda: [ModuleZero(o, not self.chance(0.3))]),
            (1.5 if state.any_grads() else 0.2, lambda: [Step(o), Zero(o)]),
            (1.2, lambda: [self.step(law, o)]),
            (0.8, lambda: [Step(k) for k in range(len(law.states))]),
            (0.5, lambda: [Zero(k) for k in range(len(law.states))]),
            (0.8, lambda: [self.clip(law, o)]),
            (2.5, lambda: self.legal(law, rare)),
        ]
        if start.scale is not None:
            common += [(1.5, lambda: [Update()]), (1.0, lambda: [Unscale(o)])]
        weights, makers = zip(*common, strict=True)
        return self.rng.choices(makers, weights)[0]()

    def rare(self, law: Law, o: int) -> list[Callable[[], list[Op]]]:
        rng, state = self.rng, law.states[o]
        p = rng.randrange(len(state.optim.shapes))
        frozen = sorted(state.given - state.requires_grad) or [p]
        return [
            lambda: [SetLr(o, rng.randrange(state.groups), rng.choice((0.0, 0.125, 0.25)))],
            lambda: [Save(o)],
            lambda: [Save(o), Load(o)],
            lambda: [Load(o)],
            lambda: [SaveFull(o)],
            lambda: [SaveFull(o)],
            lambda: [LoadFull(o)],
            lambda: [Observe(o)],
            lambda: [Renew(o, 3 if state.stage == 3 else rng.choice((0, 1, 2)), self.store())],
            lambda: [AddGroup(o)],
            lambda: [Thaw(o, rng.choice(frozen))],
            lambda: [Freeze(o, p)],
            lambda: [Edit(o, p, rng.choice((0.5, -1.0, 2.0)))],
            lambda: [Drop(o, p)],
            lambda: [Assign(o, p, self.on_rows(tuple(rng.choice(COEFFICIENTS) for _ in range(law.world))))],
            lambda: [ScaleGrad(o, p, rng.choice((0.5, 2.0)))],
            lambda: [AllReduce(rng.choice(COEFFICIENTS))],
            lambda: [AllReduce(rng.choice(COEFFICIENTS))],
            lambda: [Read(o)],
            lambda: [self.evaluate(law, o) if state.stage == 3 else self.clip(law, o)],
        ]

    # Ordinary steps, of which a store has to see some before it updates ahead of the step; and what comes between.

    def whole_backward(self, start: Program, law: Law) -> list[Op]:
        chain: list[Link] = []
        for o, state in enumerate(law.states):
            given = self.rng.sample(sorted(state.given), len(state.given))  # the first backward's order is the layout's
            units = list(state.order or range(state.optim.unit_count))
            uses = [Use(o, p, self.coefficient()) for p in given]
            chain += [self.net(law, o, given, units)] if state.stage == 3 else uses
        return [Backward((tuple(chain),) * law.world)]

    def between(self, start: Program, law: Law) -> list[Op]:
        """Nothing, or what touches gradients, parameters, state, or what is assumed of the step."""
        rng = self.rng
        o = rng.randrange(len(law.states))
        p = rng.randrange(len(law.states[o].optim.shapes))
        makers: list[Callable[[], list[Op]]] = [
            lambda: [Save(o), SaveFull(o)],
            lambda: [Load(o)],
            lambda: [LoadFull(o)],
            lambda: [Edit(o, p, rng.choice((0.5, -1.0, 2.0)))],
            lambda: [SetLr(o, 0, rng.choice((0.125, 0.25)))],
            lambda: [ModuleZero(o, False)],
            lambda: [Zero(o, False)],
            lambda: [Average(o) if self.flavour.rules else Look(o)],
            lambda: [Drop(o, p)],
            lambda: [Assign(o, p, tuple(rng.choice(COEFFICIENTS) for _ in range(law.world)))],
            lambda: [self.backward(law)],
            lambda: [self.clip(law, o)],
            lambda: self.legal(law, self.rare(law, o)),
            *(
                [lambda: [AddGroup(o)], lambda: [Thaw(o, p)], lambda: [Renew(o, law.states[o].stage)]]
                * self.flavour.groups
            ),
        ]
        return self.legal(law, makers) if self.chance(0.6) else []

    def steps(self, start: Program, law: Law) -> list[Op]:
        every = range(len(law.states))
        return [*map(Step, every), *([Update()] if start.scale is not None else []), *map(Zero, every)]

    def legal(self, law: Law, makers: list[Callable[[], list[Op]]]) -> list[Op]:
        """One of those that may come next."""
        for maker in self.rng.sample(makers, len(makers)):
            after, ops = copy.deepcopy(law), maker()
            try:
                for op in ops:
                    after.apply(op)
            except Illegal:
                continue
            return ops
        return []

    def clip(self, law: Law, o: int) -> Clip:
        given = sorted(law.states[o].given)
        some = tuple(sorted(self.rng.sample(given, self.rng.randint(1, len(given))))) if self.chance(0.3) else None
        return Clip(o, self.rng.choice((0.25, 1.0, 100.0)), self.rng.choice((2.0, 2.0, float("inf"), 1.0, 3.0)), some)

    def coefficient(self) -> float:
        return self.rng.choice(COEFFICIENTS)

    def backward(self, law: Law) -> Backward:
        rng = self.rng
        several = len(law.states)
        optims = [o for o in range(several) if several == 1 or self.chance(0.75)]
        rng.shuffle(optims)
        mode = rng.choices(("same", "values", "parameters", "left out"), (3, 3, 4, self.flavour.left_out))[0]
        calls = {o: self.calls(law, o) for o in optims if law.states[o].stage == 3}
        chains: list[list[Link]] = []
        for rank in range(law.world):
            if mode == "same" and chains:
                chains.append(list(chains[0]))
                continue
            pattern = chains[0] if chains and mode == "values" else None
            chains.append(self.again(pattern) if pattern else self.chain(law, optims, mode, rank, calls))
        if mode == "left out" and not calls:
            chains[rng.randrange(law.world)] = []
        if self.chance(self.flavour.infinite):
            self.infinite(chains[rng.randrange(law.world)])
        nothing = [not chain and self.chance(0.7) for chain in chains]
        if self.chance(self.flavour.raises):
            self.raising(chains)
        no_sync = tuple(o for o in range(several) if self.chance(0.25))
        if self.chance(0.1):
            no_sync = tuple(range(several))
        roots = rng.choice((2, 3)) if self.chance(0.15) else 1
        ranks = tuple(None if no and not chain else tuple(chain) for no, chain in zip(nothing, chains, strict=True))
        return Backward(self.on_rows(ranks), no_sync, roots)

    def step(self, law: Law, o: int) -> Step:
        """With a closure, hooks, or both."""
        rng = self.rng
        closure: list[Op] = []
        if self.chance(0.7):
            closure = [[], [Zero(o)], [ModuleZero(o)]][rng.choice((0, 0, 1, 1, 2))] + [self.backward(law)]
        set_lr = SetLr(o, rng.randrange(law.states[o].groups), rng.choice((0.125, 0.25)))
        before = rng.choice(([], [], [self.clip(law, o)], [set_lr], [AllReduce(1.0)]))
        after = rng.choice(([], [], [Zero(o)], [set_lr], [AllReduce(1.0)]))
        return Step(o, tuple(closure), tuple(before), tuple(after))

    def chain(self, law: Law, optims: list[int], mode: str, rank: int, calls: dict[int, list[int]]) -> list[Link]:
        blocks: list[list[Link]] = []
        for o in optims:
            given = sorted(law.states[o].given)
            differ = mode != "same" and (mode != "values" or rank == 0)
            if mode == "left out" and self.chance(0.3):
                chosen = []
            elif differ or self.chance(0.3):
                chosen = [p for p in given if self.chance(0.6)]
                if not chosen and (not self.flavour.left_out or self.chance(0.9)):
                    chosen = [self.rng.choice(given)]
            else:
                chosen = list(given)
            self.rng.shuffle(chosen)
            if chosen and self.chance(0.1):
                chosen.append(self.rng.choice(chosen))
            if o in calls:
                blocks.append([self.net(law, o, chosen, self.some(calls[o], law, o))])
            else:
                blocks.append([Use(o, p, self.coefficient()) for p in chosen])
        if self.chance(0.25) and not calls:  # the optimizers' parameters in turn
            flat = [link for block in blocks for link in block]
            self.rng.shuffle(flat)
            return flat
        return [link for block in blocks for link in block]

    def again(self, chain: list[Link]) -> list[Link]:
        """The same parameters with other numbers."""
        return [self.other(link) for link in chain]

    def other(self, link: Link) -> Link:
        if isinstance(link, Use):
            return replace(link, c=self.coefficient())
        assert isinstance(link, Net)
        inner = []
        for part in link.links:
            if isinstance(part, Unit):
                part = Unit(part.k, tuple((p, self.coefficient()) for p, _ in part.uses))
            elif isinstance(part, Use):
                part = replace(part, c=self.coefficient())
            inner.append(part)
        return Net(link.o, tuple(inner))

    # Stage 3

    def calls(self, law: Law, o: int) -> list[int]:
        """The units that all ranks call, or some of which each."""
        state = law.states[o]
        units = list(range(state.optim.unit_count))
        if state.order is None:
            if self.chance(0.2):
                self.rng.shuffle(units)
            return units
        if self.chance(0.15):
            self.rng.shuffle(units)
            return units
        if self.chance(0.15):
            return [*units, self.rng.choice(units)]
        return list(state.order)

    def some(self, units: list[int], law: Law, o: int) -> list[int]:
        if law.states[o].order is None or tuple(units) != law.states[o].order or self.chance(0.5):
            return units
        kept = [k for k in units if self.chance(0.6)]
        return units[: self.rng.randint(0, len(units))] if self.chance(0.3) else kept

    def net(self, law: Law, o: int, chosen: list[int], units: list[int]) -> Net:
        optim = law.states[o].optim
        parts: list[Use | Unit | Boom] = [
            Unit(k, tuple((p, self.coefficient()) for p in chosen if optim.units[p] == k)) for k in units
        ]
        for p in chosen:
            if optim.units[p] == -1:
                parts.insert(self.rng.randint(0, len(parts)), Use(o, p, self.coefficient()))
        return Net(o, tuple(parts))

    def evaluate(self, law: Law, o: int) -> Evaluate:
        units = self.calls(law, o)
        given = sorted(law.states[o].given)
        nets = tuple(self.net(law, o, given, self.some(units, law, o)) for _ in range(law.world))
        return Evaluate(self.on_rows(nets))

    # What goes wrong

    def infinite(self, chain: list[Link]) -> None:
        places = [i for i, link in enumerate(chain) if isinstance(link, Use)]
        if places:
            i = self.rng.choice(places)
            chain[i] = replace(chain[i], c=float("inf"))

    def raising(self, chains: list[list[Link]]) -> None:
        forward = self.chance(0.15)
        every = self.chance(0.3)
        for rank in range(len(chains)) if every else [self.rng.randrange(len(chains))]:
            self.raise_in(chains[rank], forward)

    def raise_in(self, chain: list[Link], forward: bool) -> None:
        i = self.rng.randint(0, len(chain))
        if not forward and i < len(chain) and isinstance(chain[i], Net) and self.chance(0.8):
            inner = list(chain[i].links)
            inner.insert(self.rng.randint(0, len(inner)), Boom())
            chain[i] = replace(chain[i], links=tuple(inner))
        else:
            chain.insert(i, Boom(forward))
