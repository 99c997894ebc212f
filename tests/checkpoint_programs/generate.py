"""Draws programs: a job, how it is trained, and the job that loads it, which differs in ways of several kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from programs.shrink import put

from checkpoint_programs.program import (
    ANCHOR,
    DTYPES,
    IN_BF16,
    Buffer,
    Group,
    Job,
    Part,
    Plan,
    Program,
    Step,
    Tie,
    Weight,
    with_part,
    without,
)

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (0, 3), (5,), (7, 3), (17, 9), (300,), (40, 25), (128,), (2, 1))
BUFFERS = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.int32)


def program(seed: int, saving: int, loading: int) -> Program:
    """The same for the same arguments."""
    rng = random.Random(seed)
    source = draw_job(rng)
    count = rng.randint(0, 3)
    hows = [(rng.choice([1, 1, 2]), rng.random() < 0.2, rng.random() < 0.2) for _ in range(count)]
    names = sorted(source.weights())
    edits = [rng.sample(names, 2) if len(names) > 1 and rng.random() < 0.3 else [] for _ in range(count)]
    steps = tuple(Step(*how, tuple(edited)) for how, edited in zip(hows, edits, strict=True))
    kind = rng.choice(["same", "rescaled", "misfit", "misfit"])
    target = source if kind == "same" else rescaled(rng, source)
    if kind == "misfit":
        target = misfitting(rng, target)
    with_opt = rng.random() < 0.85 and target.aliases() == source.aliases()
    made = Program(seed, saving, loading, source, target, steps, rng.random() < 0.3, with_opt)
    return in_forms(random.Random(f"forms {seed}"), made)


def in_forms(rng: random.Random, program: Program) -> Program:
    """The same with smaller state. What it is loaded into has the same form, or one whose values can be told."""
    source, target = [*program.source.plans], [*program.target.plans]
    for number, (saved, loaded) in enumerate(zip(program.source.plans, program.target.plans, strict=True)):
        master = rng.choice(("fp32", "split", "split8")) if saved.dtype == "bf16" and program.with_opt else "fp32"
        state_dtype = rng.choice(("fp32", *IN_BF16, "int8"))
        if saved.rule == "sharded":
            source[number] = replace(saved, master=master, state_dtype=state_dtype)
        if program.target == program.source:
            target[number] = source[number]
        elif loaded.rule == "sharded":
            kept = source[number]
            low = kept.master if loaded.dtype == "bf16" and saved.rule == "sharded" else "fp32"
            other = rng.choice((kept.state_dtype, kept.state_dtype, "fp32", *IN_BF16))
            target[number] = replace(loaded, master=low, state_dtype=other)
    return replace(
        program,
        source=replace(program.source, plans=tuple(source)),
        target=replace(program.target, plans=tuple(target)),
    )


def draw_plan(rng: random.Random, rule: str) -> Plan:
    names = iter(rng.sample(["w", "a:0", "b b", "ü", "x", "weight", "y", "z", "0", "k", "q", "master", "step"], 13))
    used = ("always", "always", "odd", "never") + (("ranks",) if rule == "sharded" else ())

    def a_part(root: bool) -> Part:
        weights = [
            Weight(next(names), rng.choice(SHAPES), rng.choice(used), rng.random() > 0.15, rng.random() < 0.15)
            for _ in range(rng.randint(0 if root else 1, 3))
        ]
        buffers = [Buffer(f"buffer{i}", rng.choice(SHAPES), rng.choice(BUFFERS)) for i in range(rng.randint(0, 2))]
        anchor = [Weight(ANCHOR, (6,))] if root else []
        return Part(tuple(anchor + weights), tuple(buffers), not root and rng.random() < 0.3)

    count = rng.randint(1, 3)
    parts = (*(a_part(False) for _ in range(count)), a_part(True))
    ties: tuple[Tie, ...] = ()
    if rng.random() < 0.5:
        source, target = rng.choice([(count, 0), *((0, n) for n in range(1, count))])
        ties = (Tie(source, parts[source].weights[0].name, target, "tied"),)
    plan = Plan(
        parts,
        (),
        ties,
        rule,
        rng.randrange(4),
        rng.choice([None, 0.0005, 0.002]),
        rng.choice(["fp32", "bf16", "fp16"] if rule == "sharded" else ["fp32", "fp32", "bf16"]),
    )
    return replace(plan, groups=_draw_groups(rng, list(plan.weights())))


def _draw_groups(rng: random.Random, names: list[str]) -> tuple[Group, ...]:
    rng.shuffle(names)
    cuts = sorted(rng.sample(range(1, len(names)), min(len(names) - 1, rng.randint(0, 2))))
    ends = [0, *cuts, len(names)]
    return tuple(
        Group(tuple(names[start:end]), rng.choice([1e-2, 3e-3]), rng.choice([0.0, 0.1]))
        for start, end in zip(ends, ends[1:], strict=False)
    )


def draw_job(rng: random.Random) -> Job:
    rules = [rng.choice(["sharded", "sharded", "sharded", "adamw"]) for _ in range(rng.choice([1, 1, 2]))]
    plans = tuple(draw_plan(rng, rule) for rule in rules)
    return Job(plans, rng.random() < 0.3, rules == ["sharded"] and rng.random() < 0.3)


def rescaled(rng: random.Random, job: Job) -> Job:
    """The same job at another stage, cap, dtype, and order within groups."""
    plans = []
    for plan in job.plans:
        groups = tuple(replace(g, names=tuple(rng.sample(g.names, len(g.names)))) for g in plan.groups)
        rule = rng.choice(["sharded", "sharded", plan.rule])
        rule = plan.rule if job.scaler or any(w.used == "ranks" for w in plan.weights().values()) else rule
        plans.append(
            replace(
                plan,
                rule=rule,
                stage=rng.randrange(4),
                cap=rng.choice([None, 0.0005, 0.002]),
                dtype=rng.choice(list(DTYPES)),
                groups=groups,
            )
        )
    return replace(job, plans=tuple(plans))


def grown(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    own = plan.parts[number].weights
    if any(weight.name == "new" for weight in own):
        return plan
    *groups, last = plan.groups
    last = replace(last, names=(*last.names, plan.local_name(number, "new")))
    new = Weight("new", rng.choice(SHAPES))
    return replace(with_part(plan, number, weights=(*own, new)), groups=(*groups, last))


def shrunk(rng: random.Random, plan: Plan) -> Plan:
    choices = plan.removable()
    return without(plan, *rng.choice(choices)) if choices else plan


def frozen_or_thawed(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    own = plan.parts[number].weights
    if not own:
        return plan
    chosen = rng.randrange(len(own))
    if own[chosen].name == ANCHOR or (own[chosen].trained and plan.rule == "adamw"):  # the second has a test of its own
        return plan
    other = replace(own[chosen], trained=not own[chosen].trained)
    return with_part(plan, number, weights=put(own, chosen, other))


def other_buffers(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    own = plan.parts[number].buffers
    added = tuple(buffer for buffer in own if buffer.name != "more") + (Buffer("more", (3,), torch.int64),)
    return with_part(plan, number, buffers=own[1:] if own and rng.random() < 0.5 else added)


def untied(rng: random.Random, plan: Plan) -> Plan:
    """The second name of a tie is a parameter of its own, in the same group."""
    for tie in plan.ties:
        weight = next(w for w in plan.parts[tie.part].weights if w.name == tie.name)
        own = plan.parts[tie.other_part].weights
        plan = with_part(plan, tie.other_part, weights=(*own, replace(weight, name=tie.other_name)))
    first = {name: other for other, name in plan.aliases().items()}
    groups = (replace(g, names=(*g.names, *(first[name] for name in g.names if name in first))) for g in plan.groups)
    return replace(plan, ties=(), groups=tuple(groups))


def other_groups(rng: random.Random, plan: Plan) -> Plan:
    return replace(plan, groups=_draw_groups(rng, list(plan.weights())))


def reshaped(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    own = plan.parts[number].weights
    if not own:
        return plan
    chosen = rng.randrange(len(own))
    before = own[chosen].shape
    if before == ():
        shape: tuple[int, ...] = (1,)
    else:
        shape = (*before, 1) if rng.random() < 0.5 else (*before[:-1], before[-1] + 1)
    return with_part(plan, number, weights=put(own, chosen, replace(own[chosen], shape=shape)))


CHANGES: tuple[Callable[[random.Random, Plan], Plan], ...] = (
    grown,
    shrunk,
    frozen_or_thawed,
    other_buffers,
    untied,
    other_groups,
    reshaped,
)


def misfitting(rng: random.Random, job: Job) -> Job:
    """A job that differs in one or two ways, as a rule in a way that strict loads refuse."""
    plans = list(job.plans)
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.randrange(len(plans))
        plans[place] = rng.choice(CHANGES)(rng, plans[place])
    other = replace(job, plans=tuple(plans))
    return replace(other, scheduler=not job.scheduler) if rng.random() < 0.1 else other
