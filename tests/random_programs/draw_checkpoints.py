"""Draws programs of checkpoints: a job, how it trains, and the job that loads it: the same, rescaled, or a misfit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from random_programs.checkpoints import IN_BF16, Buffer, Group, Job, Plan, Program, Step, Weight
from random_programs.draw import Draw

SHAPES = ((5,), (7, 3), (17, 9), (300,), (40, 25), (), (1,), (0,), (0, 3), (128,), (2, 1))
NAMES = ("w", "x", "y", "z", "a:0", "b b", "ü", "weight", "0", "k", "master", "step")
BUFFERS = ("float32", "float64", "int64", "uint8", "bool", "int32")
PLACES = ("", "units.0.", "units.1.")
DTYPES = ("float32", "bfloat16", "float16")


@st.composite
def programs(draw: Any, saving: int, loading: int) -> Program:
    d = Draw(draw)
    source = _job(d)
    kind = d.pick(("same", "rescaled", "misfit", "misfit"))
    target = source if kind == "same" else _rescaled(d, source)
    if kind == "misfit":
        target = _misfit(d, target)
    with_opt = not d.chance(15) and _ties(target) == _ties(source)
    if kind != "same":
        target = _in_forms(d, source, target, with_opt)
    steps = tuple(_step(d, source) for _ in range(d.pick((1, 0, 2, 3))))
    return Program(d.number(0, 99), saving, loading, source, target, steps, d.chance(30), with_opt)


def _step(d: Draw, job: Job) -> Step:
    names = [job.prefix(number) + weight.name for number, plan in enumerate(job.plans) for weight in plan.weights]
    return Step(d.pick((1, 1, 2)), d.chance(20), d.chance(20), tuple(d.some(names, 40)) if d.chance(30) else ())


def _ties(job: Job) -> list[list[str]]:
    return [[weight.tied for weight in plan.weights if weight.tied] for plan in job.plans]


# -- a job -------------------------------------------------------------------------------------------------------------


def _job(d: Draw) -> Job:
    rules = [d.weighted(((3, "sharded"), (1, "adamw"))) for _ in range(d.pick((1, 1, 2)))]
    return Job(tuple(_plan(d, rule) for rule in rules), d.chance(30), rules == ["sharded"] and d.chance(30))


def _plan(d: Draw, rule: str) -> Plan:
    used = ("always", "always", "odd", "never") + (("ranks",) if rule == "sharded" else ())
    weights = [Weight("anchor", (6,))]
    names = iter(d.shuffled(NAMES))
    for place in PLACES:
        for _ in range(d.number(0 if place == "" else 1, 3)):
            weight = Weight(place + next(names), d.pick(SHAPES), d.pick(used), not d.chance(15), d.chance(15))
            weights.append(weight)
    if d.chance(50):
        tied = d.pick([at for at, weight in enumerate(weights) if "units.1." not in weight.name])
        place = "units.1." if "." in weights[tied].name else d.pick(PLACES[1:])
        weights[tied] = replace(weights[tied], tied=f"{place}tied")
    buffers = [Buffer(f"{d.pick(PLACES)}buffer{i}", d.pick(SHAPES), d.pick(BUFFERS)) for i in range(d.number(0, 3))]
    dtype = d.pick(DTYPES if rule == "sharded" else ("float32", "float32", "bfloat16"))
    plan = Plan(tuple(weights), _groups(d, weights), tuple(buffers), rule, *_scale(d), dtype)
    if rule != "sharded":
        return plan
    master = d.pick(("fp32", "split", "split8")) if dtype == "bfloat16" else "fp32"
    return replace(plan, master=master, state_dtype=d.pick(("fp32", *IN_BF16, "int8")))


def _scale(d: Draw) -> tuple[int, float | None]:
    return d.pick((2, 0, 1, 3)), d.pick((None, 0.0005, 0.002))


def _groups(d: Draw, weights: list[Weight] | tuple[Weight, ...]) -> tuple[Group, ...]:
    names = [weight.name for weight in weights]
    names = d.shuffled(names) if d.chance(70) else names
    inner = {d.number(1, len(names) - 1) for _ in range(d.number(0, 2))} if len(names) > 1 else ()
    cuts = [0, *sorted(inner), len(names)]
    return tuple(
        Group(tuple(names[start:end]), d.pick((1e-2, 3e-3)), d.pick((0.0, 0.1)))
        for start, end in zip(cuts, cuts[1:], strict=False)
    )


# -- another job -------------------------------------------------------------------------------------------------------


def _rescaled(d: Draw, job: Job) -> Job:
    """The same job at another stage, cap, dtype, and order within groups."""
    plans = []
    for plan in job.plans:
        groups = tuple(replace(group, names=tuple(d.shuffled(group.names))) for group in plan.groups)
        rule = d.pick((plan.rule, "sharded", "sharded", "adamw"))
        if job.scaler or any(weight.used == "ranks" for weight in plan.weights):
            rule = plan.rule
        stage, cap = _scale(d)
        plans.append(replace(plan, rule=rule, stage=stage, cap=cap, dtype=d.pick(DTYPES), groups=groups))
    return replace(job, plans=tuple(plans))


def _in_forms(d: Draw, source: Job, target: Job, with_opt: bool) -> Job:
    """Forms of state that the source has, or whose values are known: fp32, and bf16. Neither a master in a narrower form
    nor 8 bits of what had more."""
    plans = []
    for saved, plan in zip(source.plans, target.plans, strict=True):
        narrow = plan.sharded and plan.dtype == "bfloat16" and with_opt
        forms = (saved.state_dtype, saved.state_dtype, "fp32", *IN_BF16) if plan.sharded else ("fp32",)
        plans.append(replace(plan, master=saved.master if narrow else "fp32", state_dtype=d.pick(forms)))
    return replace(target, plans=tuple(plans))


def _misfit(d: Draw, job: Job) -> Job:
    """It differs in one or two ways, as a rule in a way that strict loads refuse."""
    plans = list(job.plans)
    changes = (_grown, _shrunk, _frozen_or_thawed, _other_buffers, _untied, _other_groups, _reshaped)
    for _ in range(d.pick((1, 1, 2))):
        place = d.number(0, len(plans) - 1)
        plans[place] = d.pick(changes)(d, plans[place])
    return replace(job, plans=tuple(plans), scheduler=job.scheduler ^ d.chance(10))


def _grown(d: Draw, plan: Plan) -> Plan:
    new = Weight(f"{d.pick(PLACES)}new", d.pick(SHAPES))
    if any(weight.name.endswith("new") for weight in plan.weights):
        return plan
    *groups, last = plan.groups
    groups.append(replace(last, names=(*last.names, new.name)))
    return replace(plan, weights=(*plan.weights, new), groups=tuple(groups))


def _shrunk(d: Draw, plan: Plan) -> Plan:
    choices = [weight for weight in plan.weights[1:] if not weight.tied]
    if not choices:
        return plan
    gone = d.pick(choices)
    groups = (replace(g, names=tuple(name for name in g.names if name != gone.name)) for g in plan.groups)
    left = tuple(weight for weight in plan.weights if weight is not gone)
    return replace(plan, weights=left, groups=tuple(group for group in groups if group.names))


def _frozen_or_thawed(d: Draw, plan: Plan) -> Plan:
    return _with_other_weight(d, plan, 1, lambda weight: replace(weight, trained=not weight.trained))


def _with_other_weight(d: Draw, plan: Plan, least: int, change: Any) -> Plan:
    if len(plan.weights) <= least:
        return plan
    chosen = d.number(least, len(plan.weights) - 1)
    other = change(plan.weights[chosen])
    return replace(plan, weights=(*plan.weights[:chosen], other, *plan.weights[chosen + 1 :]))


def _other_buffers(d: Draw, plan: Plan) -> Plan:
    if plan.buffers and d.chance(50):
        return replace(plan, buffers=plan.buffers[1:])
    kept = tuple(buffer for buffer in plan.buffers if not buffer.name.endswith("more"))
    return replace(plan, buffers=(*kept, Buffer(f"{d.pick(PLACES)}more", (3,), "int64")))


def _untied(d: Draw, plan: Plan) -> Plan:
    """The second name of a tie is a parameter of its own, in the same group."""
    second = {weight.name: weight.tied for weight in plan.weights if weight.tied}
    weights = [replace(weight, tied="") for weight in plan.weights]
    weights += [replace(weight, name=weight.tied, tied="") for weight in plan.weights if weight.tied]
    groups = (replace(g, names=(*g.names, *(second[name] for name in g.names if name in second))) for g in plan.groups)
    return replace(plan, weights=tuple(weights), groups=tuple(groups))


def _other_groups(d: Draw, plan: Plan) -> Plan:
    return replace(plan, groups=_groups(d, plan.weights))


def _reshaped(d: Draw, plan: Plan) -> Plan:
    def change(weight: Weight) -> Weight:
        shape = weight.shape
        if shape == ():
            return replace(weight, shape=(1,))
        return replace(weight, shape=(*shape, 1) if d.chance(50) else (*shape[:-1], shape[-1] + 1))

    return _with_other_weight(d, plan, 0, change)
