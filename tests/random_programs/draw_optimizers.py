"""Random programs about optimizers: legal by construction, as docs/distributed-semantics.md says what ranks may do.

- ``step``, ``zero_grad``, ``clip_grad_norm_``, state dicts and constructors are called by all ranks in one order.
- A backward *reaches* an optimizer on a rank where it makes a gradient of a trained parameter there. One that is
  synchronised reaches all ranks; or else it is the only one since the last step or zeroing, and ``step`` is next
  (a clip may come before it; where every rank that was not reached has raised, and the optimizer was zeroed since its
  last step, ``zero_grad`` may take its place, but at stage 0). Under ``no_sync`` a backward may reach any ranks.
- At stage 0 a rank whose backward has ended waits for those that raised, until they step. So of such a backward one
  optimizer at most is of stage 0, and none of stage 3 is beside it.
- At stage 3 every rank calls the model as often as the others: first all units in one order; then all ranks the same
  units, or each rank some of them in that order.
- After a clip gradients are not assigned, and tokens not counted. Where they are, it is after every backward of a step.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from random_programs.draw import Draw
from random_programs.run import Program
from random_programs.words import NO_DTENSOR, WHOLE

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = ((5,), (1,), (128,), (130,), (257,), (300,), (16, 16), (7, 19), (40, 10), (600,))
EMPTY: tuple[Shape, ...] = (*SHAPES[:4], (0,), (3, 0))
MATRICES: tuple[Shape, ...] = ((5, 7), (1, 5), (8, 20), (40, 4), (17, 60), (20, 60), (58, 17), (3, 5, 7), (4, 4, 2, 2))
"""Of full rank with the gradients that programs have: else a direction would be no more than noise."""
STORES: tuple[dict[str, Any], ...] = (
    {},
    {"store": "cpu"},
    {"store": "paged", "device_budget": 0},
    {"store": "paged", "device_budget": 3072},
    {"store": "nvme:/tmp"},
)
PACKED: tuple[Shape, ...] = ((4, 3, 5), (4, 16, 2), (8, 7, 3), (4, 1, 1), (4, 9))
"""Of experts in one tensor, which two and four ranks can cut."""
FACTORS = (1.0, 0.5, 0.25, 1.5, 2.0)


@dataclass(frozen=True)
class Flavour:
    """What programs are about; numbers are percent."""

    stages: tuple[int, ...] = (2, 1, 0)
    worlds: tuple[int, ...] = (2, 2, 3)
    optimizers: tuple[int, ...] = (1,)
    raises: int = 8
    left_out: int = 12
    infinite: int = 3
    scaled: int = 10
    shapes: tuple[Shape, ...] = SHAPES
    meshes: int = 0
    cut: bool = False  # parameters, over two tensor-parallel ranks
    stores: int = 0
    rules: bool = False  # other than AdamW, and averages
    by_group: bool = False  # rules, Muon among them
    split: bool = False  # masters, of bf16 parameters
    experts: bool = False  # some parameters are, at every stage


ANY_STAGE = (2, 1, 0, 3, 3)
FLAVOURS = {
    "plain": Flavour(),
    "stage 3": Flavour(stages=(3,)),
    "empty": Flavour(shapes=EMPTY, worlds=(2, 1, 3)),
    "several": Flavour(optimizers=(2, 2, 3), raises=20),
    "mixed": Flavour(ANY_STAGE, optimizers=(1, 2, 2, 3), raises=15, infinite=5),
    "grids": Flavour((2, 1, 3), worlds=(4,), optimizers=(1, 1, 2), meshes=80),
    "slices": Flavour(ANY_STAGE, worlds=(4,), cut=True),
    "stored": Flavour(ANY_STAGE, worlds=(2, 1, 3), optimizers=(1, 1, 2), scaled=20, stores=80),
    "ruled": Flavour(ANY_STAGE, optimizers=(1, 1, 2), scaled=15, stores=30, rules=True),
    "split": Flavour(ANY_STAGE, optimizers=(1, 1, 2), scaled=15, stores=30, rules=True, split=True),
    "experts": Flavour((2, 3, 1, 3, 0), worlds=(4, 2, 4), optimizers=(1, 1, 1, 2), experts=True),
    "groups": Flavour(ANY_STAGE, optimizers=(1, 1, 2), scaled=15, stores=20, by_group=True),
}


@dataclass
class State:
    """What is known of an optimizer at a place of the text."""

    name: str
    stage: int
    options: dict[str, Any]
    given: list[int]
    late: int
    frozen: set[int]
    groups: int = 1
    swaps: bool = False  # tokens come to experts and go back, on all ranks, also where one has none for them
    grads: set[int] = field(default_factory=set)  # on any rank
    synced: int = 0  # backwards since the last step or zeroing
    pending: str = ""  # what has to follow: "step" or "step or zero"
    raised: bool = False  # on all ranks, or where all were reached
    zeroed: bool = False  # since the last step, by the optimizer's own
    clipped: bool = False
    saved: set[str] = field(default_factory=set)  # "own" and "full"
    order: list[int] | None = None  # of units
    recorded: bool = False  # in a forward with gradients

    @property
    def trained(self) -> set[int]:
        return {*self.given} - self.frozen

    @property
    def units(self) -> list[int]:
        return self.options.get("units", [])

    @property
    def expert_units(self) -> set[int]:
        return {self.units[p] for p in self.options.get("experts", [])} if self.units else set()

    @property
    def apart(self) -> bool:
        """Whether ranks have different experts under one name, of which no whole is known."""
        several = dict(self.options.get("expert_mesh", {})).get("ep", 1) > 1
        return several and len(self.options["experts"]) > len(self.options.get("packed", []))

    @property
    def quiet(self) -> bool:
        return not self.pending and not self.raised

    def forget(self) -> None:
        self.synced, self.pending, self.raised = 0, "", False


def program(draw: Draw, flavour: Flavour) -> Program:
    return _Generator(draw, flavour).program()


class _Generator(Draw):
    def __init__(self, draw: Draw, flavour: Flavour) -> None:
        super().__init__(draw.draw)
        self.flavour = flavour
        self.world = self.pick(flavour.worlds)
        self.scaled = self.chance(flavour.scaled)
        self.lines: list[str] = []
        self.signed = not flavour.by_group  # else a direction may be what rounding has left

    def program(self) -> Program:
        dtypes = ((7, "float32"), (6 if self.flavour.stores else 2, "bfloat16"), (1, "float16"))
        dtype = "bfloat16" if self.flavour.split else self.weighted(dtypes)
        count = self.pick(self.flavour.optimizers)
        self.states = [self.made(name, dtype) for name in "abc"[:count]]
        if self.scaled:
            self.lines.append("scaler(8.0)")
        if self.chance(30):  # ordinary steps, of which a store has to see some
            self.loop()
        for _ in range(self.number(1, 20 // (1 + self.scaled))):
            self.settle()
            self.iteration() if self.scaled else self.operation()
        self.settle()
        for s in self.states:
            if s.stage == 3 and s.raised:
                self.step(s)
        return Program(self.world, "\n".join([*self.lines, ""]))

    # Making

    def made(self, name: str, dtype: str) -> State:
        flavour = self.flavour
        stage = self.pick(flavour.stages)
        count = max(self.pick((1, 2, 3, 4, 6)), 2 if stage == 3 else 1)
        shapes = [self.pick(flavour.shapes) for _ in range(count)]
        frozen = {p for p in range(1, count) if self.chance(10)}
        order = self.shuffled(range(count)) if self.chance(20) else list(range(count))
        late = [order.pop()] if stage != 3 and count > 2 and self.chance(25) else []
        at = self.number(1, len(order) - 1) if len(order) > 1 and self.chance(40) else len(order)
        options: dict[str, Any] = {"stage": stage}
        experts = self.experts(options, stage, shapes) if flavour.experts else set()
        if experts:
            at, order = 0, [p for p in order if p not in experts]
            order += [p for p in range(count) if p in experts and p not in late]
            at = next((at for at, p in enumerate(order) if p in experts), len(order))
        rules = self.rules(options)
        groups = [self.group(part, shapes, rules) for part in (order[:at], order[at:]) if part]
        options |= {"groups": groups, "late": [self.group(late, shapes, rules)] if late else []}
        for group in (*options["groups"], *options["late"]) if experts else ():
            if group["params"][0] in experts:
                group["grad_divisor"] = self.pick((self.world, self.world, 2))
                group |= {"mesh": "edp"} if stage < 3 or self.chance(30) else {}
        if not {*order} - frozen:
            frozen = set()
        if stage == 3:
            used = self.number(1, min(4, count))
            least = -1 if used < count and self.chance(60) else 0
            options["units"] = self.shuffled(
                [*range(used), *(self.number(least, used - 1) for _ in range(count - used))]
            )
            if experts:
                options["units"] = self.units_of_experts(count, experts)
            options |= {"prefetch": self.pick((1, 0, 2)), "reshard_after_forward": not self.chance(20)}
        options |= self.settings(dtype, stage)
        if flavour.cut:
            cuts = [self.pick((*range(len(shape)), WHOLE, NO_DTENSOR)) for shape in shapes]
            cuts[order[0]] = max(cuts[order[0]], WHOLE)
            options["cut"] = cuts
        written = "".join(f", {key}={value!r}" for key, value in options.items() if value not in ([], None))
        self.lines.append(f"{name} = optimizer({shapes}, frozen={sorted(frozen)}{written})")
        swaps = bool(experts) and stage == 3 and self.chance(70)
        return State(name, stage, options, order, len(late), frozen, len(groups), swaps)

    def experts(self, options: dict[str, Any], stage: int, shapes: list[Shape]) -> set[int]:
        """The numbers of those parameters that are experts, not all; of some of them all are in one tensor."""
        found = self.some(range(1, len(shapes)), 50, least=min(1, len(shapes) - 1))
        if not found:
            return set()
        parts = self.pick([parts for parts in (2, 4, 1) if self.world % parts == 0])
        packed = [p for p in found if self.chance(40)]
        for p in packed:
            shapes[p] = self.pick(PACKED)
        sizes = [("edp", self.world // parts), ("ep", parts)]
        options |= {"experts": sorted(found), "packed": sorted(packed)}
        options["expert_mesh"] = sizes[::-1] if self.chance(30) else sizes
        return {*found}

    def units_of_experts(self, count: int, experts: set[int]) -> list[int]:
        """Of each parameter its unit: none has experts and others."""
        of = {p: self.number(0, 1) * 2 + (p in experts) for p in range(count)}
        number = dict(zip(self.shuffled(sorted({*of.values()})), range(4), strict=False))
        rest = -1 if self.chance(40) else number[of[0]]
        return [number[of[p]] if p in experts or p == 0 or of[p] != of[0] else rest for p in range(count)]

    def settings(self, dtype: str, stage: int) -> dict[str, Any]:
        flavour = self.flavour
        options: dict[str, Any] = {"dtype": dtype, "bucket_cap_mb": self.pick((0.002, 0.001, 0.004, 25.0))}
        if self.chance(20):
            options["overlap_grad_reduce"] = False
        if stage in (1, 2) and self.chance(20):
            options["overlap_param_gather"] = True
        if self.chance(25):
            options["poison"] = True
        if self.chance(10):
            options["max_grad_norm"] = self.pick((0.5, 4.0))
        if self.chance(flavour.meshes):
            options["mesh"] = self.pick(("shard", "all"))
        if self.chance(30):
            options["check_replicas_every"] = self.pick((1, 2, 3))
        if self.chance(flavour.stores):
            options |= self.pick(STORES)
            if stage == 3 and self.chance(50):
                options["param_offload"] = self.pick(("cpu", f"nvme:{tempfile.gettempdir()}"))
        if (flavour.rules or flavour.by_group) and self.chance(30):
            options["ema_decay"] = self.pick((0.5, 0.75))
        if flavour.split:
            options["master"] = self.pick(("split", "split8"))
        return options

    def rules(self, options: dict[str, Any]) -> list[str]:
        """Those of groups, one of a kind; the first is the optimizer's."""
        if self.flavour.rules:
            options["rule"] = self.pick(("adamw", "amsgrad", "nesterov", "sgd"))
        if not self.flavour.by_group:
            return []
        allowed = ["muon", "lion", self.pick(("adamw", "amsgrad")), self.pick(("nesterov", "sgd"))]
        options["rule"] = self.pick(allowed)
        return [options["rule"], *allowed]

    def group(self, params: list[int], shapes: list[Shape], rules: list[str]) -> dict[str, Any]:
        made: dict[str, Any] = {"params": params, "lr": self.pick((0.125, 0.25, 0.0625))}
        made["weight_decay"] = self.pick((0.0, 0.25))
        if rules:
            rule = self.pick(rules)
            if rule != rules[0]:
                made["rule"] = rule
            if rule == "muon":
                view = self.pick((None, None, ("rows", 2), ("columns", 2), ("rows", 4)))
                fitting = [shape for shape in MATRICES if view is None or _fits(shape, *view)]
                for p in params:
                    shapes[p] = self.pick(fitting)
                made |= {"lr": self.pick((0.5, 1.0))} | ({"view": dict([view])} if view else {})
        return made

    # What there is to do

    def loop(self) -> None:
        outside, self.lines = self.lines, []
        self.backward(self.states, whole=True, same=True)
        for s in self.states:
            if self.chance(30):
                self.count(s)
        names = ", ".join(s.name for s in self.states)
        body = [*self.lines, f"step({names})", *(["update()"] if self.scaled else []), f"zero({names})"]
        self.lines = [*outside, f"for _ in range({self.number(2, 4)}):", *(f"    {line}" for line in body)]
        for s in self.states:
            s.grads, s.zeroed = set(), True
            s.forget()

    def count(self, s: State) -> None:
        tokens = self.of_rows([self.pick((0, 1, 3, 7, 40)) for _ in range(self.world)])
        self.lines.append(f"count({s.name}, {', '.join(map(str, tokens))})")

    def counted(self, s: State) -> None:
        """A step whose tokens are counted."""
        if s.pending:
            return
        self.zero(s)
        for _ in range(self.number(1, 2)):
            self.backward([s], whole=True)
            self.count(s)
            if s.pending:
                break
        if self.chance(30):
            self.clip(s)
        self.stepped_and_zeroed([s])

    def operation(self) -> None:
        s = self.pick(self.states)
        self.weighted(
            (
                (6, lambda: self.backward(self.touched())),
                (3 if s.grads else 1, lambda: self.step(s)),
                (3, lambda: self.stepped_and_zeroed(self.states if self.chance(50) else [s])),
                (1, lambda: self.zero(s)),
                (6 if s.raised else 1, lambda: self.module_zero(s)),
                (1, lambda: self.closure(s)),
                (2, lambda: self.counted(s)),
                (1, lambda: self.clip(s)),
                (3, lambda: self.rare(s)),
            )
        )()

    def touched(self) -> list[State]:
        return self.shuffled(self.some(self.states, 75, least=1)) if len(self.states) > 1 else self.states

    def stepped_and_zeroed(self, states: Sequence[State]) -> None:
        for s in states:
            self.step(s)
        for s in states:
            self.zero(s)

    def iteration(self) -> None:
        """With a scaler: backwards, a step of each optimizer, and the update."""
        for _ in range(self.pick((1, 1, 2))):
            self.backward(self.states, whole=True)
            if any(s.pending for s in self.states):
                break
        for s in sorted(self.states, key=lambda s: (not s.pending, s.stage in (1, 2))):
            if not s.grads & s.trained:
                continue
            if self.chance(30):
                self.lines.append(f"unscale({s.name})")
                s.clipped, s.synced = True, s.synced + 1
                if self.chance(50):
                    self.clip(s)
            self.step(s)
        self.lines.append("update()")
        for s in self.states:
            self.zero(s)

    def settle(self) -> None:
        """What has to follow a backward that some ranks were left out of."""
        for s in sorted((s for s in self.states if s.pending), key=lambda s: s.stage in (1, 2)):
            if self.chance(15):
                self.clip(s)
            if s.pending == "step or zero" and self.chance(40):
                self.zero(s)
            elif self.settles_in_closure(s) and self.chance(40):
                self.closure(s)
            else:
                self.step(s)

    def step(self, s: State, more: str = "") -> None:
        self.lines.append(f"step({s.name}{more})")
        s.clipped = s.zeroed = False
        s.forget()

    def zero(self, s: State, word: str = "zero") -> None:
        # After an exception a module's zero_grad is seen where it drops gradients, not where it writes zeros.
        to_none = (s.raised and word == "module_zero") or not self.chance(25)
        self.lines.append(f"{word}({s.name}{'' if to_none else ', to_none=False'})")
        s.grads = set() if to_none else s.grads
        if word == "zero":
            s.clipped = False
            s.forget()
            s.zeroed = True

    def module_zero(self, s: State) -> None:
        if not (s.stage == 3 and s.raised):
            self.zero(s, "module_zero")

    def clip(self, s: State) -> None:
        most, kind = self.pick((1.0, 0.25, 100.0)), self.pick(("2.0", "float('inf')", "1.0", "3.0"))
        some = f", {sorted(self.some(s.given, 50, least=1))}" if self.chance(30) else ""
        self.lines.append(f"clip({s.name}, {most}, {kind}{some})")
        s.clipped, s.synced, s.raised = True, s.synced + 1, False

    def settles_in_closure(self, s: State) -> bool:
        """Whether a step with a closure may follow a backward that some ranks were left out of: at stage 3."""
        alone = not any(other.pending for other in self.states if other is not s)
        return s.stage == 3 and alone and not (self.scaled or s.clipped)

    def closure(self, s: State) -> None:
        """A step with a closure, hooks, or both."""
        if s.raised and not s.pending:
            return
        more = ""
        if self.chance(70):
            outside, self.lines = self.lines, []
            if not s.pending and self.chance(50):
                self.zero(s)
            self.backward([s], whole=True)
            inside, self.lines = self.lines, outside
            self.lines += ["def closure():", *(f"    {line}" for line in inside)]
            more = ", closure=closure"
        lr = f"set_lr({s.name}, {self.number(0, s.groups - 1)}, {self.pick((0.125, 0.25))})"
        if (before := self.pick(("", lr, "all_reduce(1.0)"))) and not s.pending:
            more += f", before=lambda: {before}"
        if after := self.pick(("", lr, "all_reduce(1.0)")):
            more += f", after=lambda: {after}"
        self.step(s, more)

    def rare(self, s: State) -> None:
        """One thing that may come next."""
        p = self.pick(s.given)
        kinds = [kind for kind in RARE if RARE[kind](self, s, p)]
        if kinds:
            kind = self.weighted([(WEIGHTS.get(kind, 1), kind) for kind in kinds])
            if kind in LINES:
                self.lines.append(LINES[kind].format(s.name))
            else:
                getattr(self, f"_{kind}")(s, p)

    # Rare operations, where RARE allows them

    def _set_lr(self, s: State, p: int) -> None:
        self.lines.append(f"set_lr({s.name}, {self.number(0, s.groups - 1)}, {self.pick((0.25, 0.0))})")

    def _save(self, s: State, p: int) -> None:
        self.lines.append(f"saved_{s.name} = saved({s.name})")
        s.saved = s.saved | {"own"}

    def _save_full(self, s: State, p: int) -> None:
        self.lines.append(f"full_{s.name} = full({s.name})")
        s.saved, s.raised = s.saved | {"full"}, False

    def _check(self, s: State, p: int) -> None:
        self.lines.append(f"check({s.name})")
        s.raised = False

    def _observe(self, s: State, p: int) -> None:
        self.lines.append(f"{s.name}.opt.observe()")
        s.order, s.recorded, s.raised = None, False, False

    def _renew(self, s: State, p: int) -> None:
        s.stage = 3 if s.stage == 3 else self.pick((2, 1, 0))
        store = self.pick(STORES) if self.flavour.stores else {}
        budget = {"budget": store["device_budget"]} if "device_budget" in store else {}
        named = ({"store": store["store"]} if store else {}) | budget
        self.lines.append(f"renew({s.name}, {s.stage}{''.join(f', {k}={v!r}' for k, v in named.items())})")
        s.grads = set()
        s.saved, s.zeroed, s.clipped = set(), False, False
        s.forget()

    def _add_group(self, s: State, p: int) -> None:
        self.lines.append(f"add_group({s.name})")
        s.given = [*s.given, *s.options["late"][0]["params"]]
        s.late, s.groups, s.saved, s.raised = 0, s.groups + 1, set(), False

    def _edit(self, s: State, p: int) -> None:
        self.lines.append(f"edit({s.name}, {p}, {self.pick((0.5, 2.0, -1.0))})")

    def _reset(self, s: State, p: int) -> None:
        more = ", keep=None" if self.chance(30) else ""
        self.lines.append(f"reset({s.name}{more}{', keep_ema=False' if self.chance(30) else ''})")

    def _drop(self, s: State, p: int) -> None:
        self.lines.append(f"{s.name}.params[{p}].grad = None")
        s.grads = s.grads - {p}

    def _assign(self, s: State, p: int) -> None:
        factors = self.of_rows([self.factor() for _ in range(self.world)])
        self.lines.append(f"assign({s.name}, {p}, {', '.join(map(str, factors))})")
        s.grads = s.grads | {p}

    def _evaluate(self, s: State, p: int) -> None:
        calls = self.calls(s, trains=False)
        nets = [_link([s.name, *self.parts(s, s.given, of_rank, swaps=True)]) for of_rank in self.of_rows(calls)]
        self.lines.append(f"evaluate({', '.join(nets)})")

    # Backward

    def factor(self) -> float:
        sign = -1 if self.signed and self.chance(40) else 1
        return sign * self.pick(FACTORS)

    def of_rows(self, ranks: Sequence[Any]) -> list[Any]:
        """The same for both ranks of a row, where parameters are cut."""
        return [ranks[rank - rank % 2] for rank in range(len(ranks))] if self.flavour.cut else list(ranks)

    def backward(self, states: Sequence[State], whole: bool = False, same: bool = False) -> None:
        """``whole``: all of these, synchronised, without a raise. ``same``: with every parameter on all ranks."""
        flavour = self.flavour
        kind = "same" if same else self.pick(("same", "values", "parameters"))
        if not same and (self.scaled or not whole) and self.chance(flavour.raises + flavour.left_out):
            kind = self.differing(states, whole) or kind
        held = [] if whole else [s for s in states if self.chance(25)]
        synced = [s for s in states if s not in held]
        chosen = self.chosen(states, kind)
        if kind in ("values", "parameters") and held and self.chance(40):  # under no_sync, whatever came before
            chosen = self.leave_out(chosen, [s.name for s in held if s.stage != 3])
        calls = {s.name: self.calls(s, alike=kind in ("raises", "left out")) for s in states if s.stage == 3}
        for s, (rank, of_rank) in itertools.product([s for s in states if s.stage == 3], enumerate(chosen)):
            used = [p for p in of_rank[s.name] if s.units[p] in (-1, *calls[s.name][rank])]
            if not {*used} & s.trained and {*of_rank[s.name]} & s.trained:
                calls[s.name][rank] = s.order or []
            else:
                of_rank[s.name] = used
        swaps = kind != "raises"
        chains = [self.chain(states, of_rank, calls, rank, swaps) for rank, of_rank in enumerate(chosen)]
        if kind == "same":
            chains = [list(chains[0]) for _ in chains]
        for s in states:
            s.grads = s.grads | {p for of_rank in chosen for p in of_rank[s.name] if p in s.trained}
        reached = [{s.name: bool({*of_rank[s.name]} & s.trained) for s in states} for of_rank in chosen]
        raising = self.raise_in(states, chains, chosen, reached) if kind == "raises" else []
        if self.chance(flavour.infinite) and not held:
            self.infinite(chains)
        self.write(chains, held)
        for s in synced:
            self.after(s, [of_rank[s.name] for of_rank in reached], raising)
        for s in held:
            s.raised = s.raised or (bool(raising) and s.stage == 3)
            if raising and s.stage == 3:
                s.pending = "step"

    def differing(self, states: Sequence[State], whole: bool) -> str:
        """How ranks differ in whether they reach these optimizers, or empty: they may not. It makes room for that."""
        stages = [s.stage for s in states]
        if self.world == 1 or stages.count(0) + stages.count(3) > 1:
            return ""
        if any(s.order is None for s in states if s.stage == 3):
            return ""
        for s in self.states:
            if s.raised or (s.synced and s in states):
                self.step(s) if self.chance(50) and not self.scaled else None
                self.zero(s)
        return self.weighted([(self.flavour.left_out, "left out"), (0 if whole else self.flavour.raises, "raises")])

    def chosen(self, states: Sequence[State], kind: str) -> list[dict[str, list[int]]]:
        """Of each rank and optimizer the parameters that its chain uses, in order."""
        first = {s.name: self.shuffled(s.given) if self.chance(60) else list(s.given) for s in states}
        found = []
        for rank in range(self.world):
            if kind in ("same", "values", "raises") or rank == 0 or (self.flavour.cut and rank % 2):
                found.append(found[-1] if self.flavour.cut and rank % 2 else {k: list(v) for k, v in first.items()})
                continue
            found.append({s.name: self.subset(s, first[s.name]) for s in states})
        return self.leave_out(found, [*first]) if kind == "left out" else self.of_rows(found)

    def leave_out(self, chosen: list[dict[str, list[int]]], names: Sequence[str]) -> list[dict[str, list[int]]]:
        """The same, but some ranks use nothing of these optimizers."""
        found = list(chosen)
        for rank in self.of_rows(range(self.world)):
            if rank and self.chance(60):
                found[rank] = {**found[rank], **{name: [] for name in names}}
        return self.of_rows(found)

    def subset(self, s: State, params: list[int]) -> list[int]:
        """With one at least that is trained."""
        some = self.some(params, 60)
        return some if {*some} & s.trained else [*some, min(s.trained)]

    def chain(
        self, states: Sequence[State], of_rank: dict[str, list[int]], calls: Any, rank: int, swaps: bool
    ) -> list[Any]:
        """Strings are links; at stage 3 a list, whose head is the name, holds the links of the model's call."""
        links: list[Any] = []
        for s in states:
            if s.stage == 3:
                links.append([s.name, *self.parts(s, of_rank[s.name], calls[s.name][rank], swaps)])
            else:
                params = [*of_rank[s.name]]
                if params and self.chance(8):
                    params.append(params[0])
                links += [f"use({s.name}, {p}, {self.factor()})" for p in params]
        return links

    def calls(self, s: State, alike: bool = False, trains: bool = True) -> list[list[int]]:
        """Of each rank the units that it calls. The first time all call all, in an order that holds from then on. With
        swaps so does the first time with gradients, from which on the library holds to it."""
        every = sorted({*s.units} - {-1})
        if s.order is None:
            s.order, s.recorded = self.shuffled(every) if self.chance(20) else every, trains
            return [s.order for _ in range(self.world)]
        before, s.recorded = s.recorded, s.recorded or trains
        if alike or (s.swaps and not before) or self.chance(40):
            return [s.order for _ in range(self.world)]
        if self.chance(40):
            again = [*self.shuffled(every), *([self.pick(every)] if self.chance(50) else [])]
            return [again] * self.world
        kept = {*every} - s.expert_units if s.swaps else set()  # else one waits in a gather, and another in a swap
        return [[k for k in s.order if k in kept or self.chance(60)] for _ in range(self.world)]

    def parts(self, s: State, params: Sequence[int], called: Sequence[int], swaps: bool) -> list[str]:
        links, swaps = [], swaps and s.swaps
        in_order = [k for k in s.order or [] if k in called] == [*called]
        for k in s.order or [] if in_order else called:
            uses = ", ".join(f"{p}: {self.factor()}" for p in params if s.units[p] == k)
            call = [f"({k}, {{{uses}}})"] if k in called else []
            links += [f"swap({s.name})", *call, f"swap({s.name})"] if swaps and k in s.expert_units else call
        for p in params:
            if s.units[p] == -1:
                links.insert(self.number(0, len(links)), f"{{{p}: {self.factor()}}}")
        return links

    def raise_in(self, states: Any, chains: list[list[Any]], chosen: Any, reached: list[dict[str, bool]]) -> list[int]:
        """Put ``boom`` into the chains of some ranks; return these. Gradients of what comes before it are not made."""
        raising = self.of_rows(
            [rank for rank in range(self.world) if self.chance(50)] or [self.number(0, self.world - 1)]
        )
        raising = sorted({rank - rank % 2 + k for rank in raising for k in (0, 1)} if self.flavour.cut else {*raising})
        for rank in raising:
            if self.flavour.cut and rank % 2:
                chains[rank], reached[rank] = chains[rank - 1], reached[rank - 1]
                continue
            chain = chains[rank]
            at = self.number(0, len(chain))
            inner = at < len(chain) and isinstance(chain[at], list)
            if inner and self.chance(80):
                place = self.number(1, len(chain[at]))
                before, behind = (
                    [*chain[:at], chain[at][:place]],
                    [[chain[at][0], *chain[at][place:]], *chain[at + 1 :]],
                )
                chain[at] = [*chain[at][:place], "boom", *chain[at][place:]]
            else:
                before, behind = chain[:at], chain[at:]
                chains[rank] = [*before, "boom", *behind]
            come = _used(behind) - _used(before)  # a gradient is there once backward is through with its first use
            for s in states:
                reached[rank][s.name] = any((s.name, p) in come for p in s.trained)
        return raising

    def infinite(self, chains: list[list[Any]]) -> None:
        rank = self.number(0, self.world - 1)
        rank -= rank % 2 if self.flavour.cut else 0
        places = [at for at, link in enumerate(chains[rank]) if isinstance(link, str) and link.startswith("use")]
        if places:
            at = self.pick(places)
            chains[rank][at] = chains[rank][at].rpartition(", ")[0] + ", float('inf'))"

    def write(self, chains: list[list[Any]], held: Sequence[State]) -> None:
        texts = ["[" + ", ".join(_link(link) for link in chain) + "]" for chain in self.of_rows(chains)]
        sharded = any(isinstance(link, list) for chain in chains for link in chain)
        texts = ["None" if text == "[]" and not sharded and self.chance(70) else text for text in texts]
        texts = self.of_rows(texts)
        if len({*texts}) == 1:
            texts = texts[:1]
        more = f", no_sync=[{', '.join(s.name for s in held)}]" if held else ""
        more += f", roots={self.pick((2, 3))}" if self.chance(15) else ""
        self.lines.append(f"back({', '.join(texts)}{more})")

    def after(self, s: State, reached: list[bool], raising: list[int]) -> None:
        """A synchronised backward has reached these ranks."""
        s.clipped = False
        if not any(reached) and s.stage != 3:
            s.raised = False
            return
        s.synced += 1
        partial = not all(reached) or (bool(raising) and s.stage == 3)
        waits = bool(raising) and s.stage == 0 and len(raising) < self.world
        if partial or waits:
            left = [rank for rank, of_rank in enumerate(reached) if not of_rank]
            only_raised = {*left} <= {*raising} and s.zeroed and s.stage in (1, 2)
            s.pending = "step or zero" if only_raised else "step"
        s.raised = bool(raising)


def _used(links: Sequence[Any]) -> set[tuple[str, int]]:
    """The optimizer and the number of what links use."""
    found = set()
    for link in links:
        if isinstance(link, list):
            found |= {(link[0], int(p)) for part in link[1:] for p in re.findall(r"(\d+): ", part)}
        elif use := re.match(r"use\((\w), (\d+)", link):
            found.add((use[1], int(use[2])))
    return found


def _link(link: Any) -> str:
    return f"net({', '.join(link)})" if isinstance(link, list) else link


def _fits(shape: Shape, side: str, blocks: int) -> bool:
    """Whether a view cuts the matrices of this shape: of a stack, or of a convolution, [out, the rest]."""
    rows, columns = shape[-2:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))
    return (rows if side == "rows" else columns) % blocks == 0


# How often each is drawn among those that are allowed; else 1. Some are seldom allowed.
WEIGHTS = {"load": 9, "load_full": 9, "add_group": 5, "edit": 3, "drop": 3, "average": 3, "save": 2}
LINES = {  # of those after which nothing else is allowed or forbidden
    "load": "{0}.opt.load_state_dict(saved_{0})",
    "load_full": "load_full({0}, full_{0})",
    "all_reduce": "all_reduce(1.0)",
    "read": "read({0})",
    "average": "average({0})",
    "look": "look({0})",
}
Allowed = Callable[[_Generator, State, int], bool]
RARE: dict[str, Allowed] = {
    "set_lr": lambda g, s, p: True,
    "save": lambda g, s, p: not s.pending,
    "load": lambda g, s, p: "own" in s.saved and not s.grads and s.quiet,
    "save_full": lambda g, s, p: not s.pending and not s.apart,
    "check": lambda g, s, p: not s.pending,
    "load_full": lambda g, s, p: "full" in s.saved and not s.grads and s.quiet,
    "observe": lambda g, s, p: not s.pending,
    "renew": lambda g, s, p: not s.pending,
    "add_group": lambda g, s, p: not s.pending and s.late > 0,
    "edit": lambda g, s, p: s.quiet and (s.stage != 3 or (not g.flavour.cut and p in s.trained and not s.synced)),
    "reset": lambda g, s, p: s.quiet,
    "drop": lambda g, s, p: s.quiet and p in s.trained,
    "assign": lambda g, s, p: s.quiet and s.stage != 3 and p in s.trained and not s.clipped,
    "all_reduce": lambda g, s, p: g.world > 1 and all(other.quiet for other in g.states),
    "read": lambda g, s, p: all(other.quiet for other in g.states),
    "average": lambda g, s, p: not s.pending and "ema_decay" in s.options and all(o.quiet for o in g.states),
    "look": lambda g, s, p: s.quiet and s.stage != 3,
    "evaluate": lambda g, s, p: s.quiet and s.stage == 3,
}
