"""Draws programs of checkpoints: a job, how it trains, and the job that loads it: the same, rescaled, or a misfit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from random_programs.checkpoints import IN_BF16, Buffer, Job, Program, Step, Weight
from random_programs.draw import Draw

SHAPES = ((5,), (7, 3), (17, 9), (300,), (40, 25), (), (1,), (0,), (0, 3), (128,), (2, 1))
NAMES = ("w", "x", "y", "z", "a:0", "b b", "ü", "weight", "0", "k", "master", "step")
BUFFERS = ("", "", "float32", "float64", "int64", "uint8", "bool", "int32")
PLACES = ("", "units.0.", "units.1.")
DTYPES = ("float32", "bfloat16", "float16")
RANKS = (2, 1, 3, 4)


def program(d: Draw, saving: Sequence[int] = RANKS, loading: Sequence[int] = RANKS) -> Program:
    """Saved and loaded by one of these numbers of ranks."""
    source = _job(d)
    kind = d.pick(("same", "rescaled", "misfit", "misfit"))
    target = source if kind == "same" else _rescaled(d, source)
    if kind == "misfit":
        target = _misfit(d, target)
    with_opt = not d.chance(15) and target.ties() == source.ties()
    if kind != "same" or not with_opt:
        target = _in_forms(d, source, target, with_opt)
    names = [weight.name for weight in source.weights]
    steps = tuple(_step(d, names) for _ in range(d.pick((1, 0, 2, 3))))
    ranks = d.pick(saving), d.pick(loading)
    return Program(d.number(0, 99), *ranks, source, target, steps, d.chance(30), with_opt)


def _step(d: Draw, names: list[str]) -> Step:
    return Step(d.pick((1, 1, 2)), d.chance(20), d.chance(20), tuple(d.some(names, 40)) if d.chance(30) else ())


# -- a job -------------------------------------------------------------------------------------------------------------


def _job(d: Draw) -> Job:
    weights = [Weight("anchor", (6,))]
    names = iter(d.shuffled(NAMES))
    for place in PLACES:
        for _ in range(d.number(0 if place == "" else 1, 3)):
            used = d.pick(("always", "always", "odd", "never", "ranks"))
            weights.append(Weight(place + next(names), d.pick(SHAPES), used, not d.chance(15), d.chance(15)))
    if d.chance(50):
        tied = d.pick([at for at, weight in enumerate(weights) if "units.1." not in weight.name])
        place = "units.1." if "." in weights[tied].name else d.pick(PLACES[1:])
        weights[tied] = replace(weights[tied], tied=f"{place}tied")
    buffers = [Buffer(f"{d.pick(PLACES)}buffer{i}", d.pick(SHAPES), d.pick(BUFFERS)) for i in range(d.number(0, 3))]
    dtype = d.pick(DTYPES)
    return Job(
        tuple(weights),
        _groups(d, weights),
        tuple(buffers),
        **_scale(d),
        dtype=dtype,
        master=d.pick(("fp32", "split", "split8")) if dtype == "bfloat16" else "fp32",
        state_dtype=d.pick(("fp32", *IN_BF16, "int8")),
        scheduler=d.chance(30),
        scaler=d.chance(30),
    )


def _scale(d: Draw) -> dict[str, Any]:
    return {"lr": d.pick((1e-2, 3e-3)), "stage": d.pick((2, 0, 1, 3)), "cap": d.pick((None, 0.0005, 0.002))}


def _groups(d: Draw, weights: Sequence[Weight]) -> tuple[tuple[str, ...], ...]:
    names = [weight.name for weight in weights]
    names = d.shuffled(names) if d.chance(70) else names
    cuts = sorted({0, *(d.number(0, len(names) - 1) for _ in range(d.number(0, 2))), len(names)})
    return tuple(tuple(names[start:end]) for start, end in zip(cuts, cuts[1:], strict=False))


# -- another job -------------------------------------------------------------------------------------------------------


def _rescaled(d: Draw, job: Job) -> Job:
    """The same job with another lr, stage, cap, dtype, and order within groups."""
    groups = tuple(tuple(d.shuffled(group)) for group in job.groups)
    return replace(job, dtype=d.pick(DTYPES), groups=groups, **_scale(d))


def _in_forms(d: Draw, source: Job, target: Job, with_opt: bool) -> Job:
    """Forms of state that the source has, or whose values are known: fp32, and bf16. No master in a narrower form,
    and not 8 bits of what had more."""
    master = source.master if target.dtype == "bfloat16" and with_opt else "fp32"
    state_dtype = d.pick((source.state_dtype, source.state_dtype, "fp32", *IN_BF16))
    return replace(target, master=master, state_dtype=state_dtype)


def _misfit(d: Draw, job: Job) -> Job:
    """It differs in one or two ways, as a rule in a way that strict loads refuse."""
    for _ in range(d.pick((1, 1, 2))):
        job = _changed(d, job)
    return replace(job, scheduler=job.scheduler ^ d.chance(10))


def _changed(d: Draw, job: Job) -> Job:
    how = d.pick(("grown", "shrunk", "frozen or thawed", "other buffers", "untied", "other groups", "reshaped"))
    weights = list(job.weights)
    at = d.number(0 if how == "reshaped" else min(1, len(weights) - 1), len(weights) - 1)
    chosen = weights[at]
    if how == "other groups":
        return replace(job, groups=_groups(d, weights))
    if how == "other buffers":
        more = Buffer(f"{d.pick(PLACES)}more{len(job.buffers)}", (3,), "int64")
        return replace(job, buffers=job.buffers[1:] if job.buffers and d.chance(50) else (*job.buffers, more))
    if how == "grown":
        weights.append(Weight(f"{d.pick(PLACES)}new{len(weights)}", d.pick(SHAPES)))
    elif how == "shrunk" and at and not chosen.tied:
        del weights[at]
    elif how == "frozen or thawed" and at:
        weights[at] = replace(chosen, trained=not chosen.trained)
    elif how == "reshaped":
        *before, last = chosen.shape or (0,)
        weights[at] = replace(chosen, shape=(*chosen.shape, 1) if d.chance(50) else (*before, last + 1))
    elif how == "untied":  # the second name is a parameter of its own
        weights += [replace(weight, name=weight.tied) for weight in weights if weight.tied]
        weights = [replace(weight, tied="") for weight in weights]
    return _with_weights(job, weights)


def _with_weights(job: Job, weights: Sequence[Weight]) -> Job:
    """New ones come into the last group."""
    names = [weight.name for weight in weights]
    known = {name for group in job.groups for name in group}
    groups = [[name for name in group if name in names] for group in job.groups]
    groups[-1] += [name for name in names if name not in known]
    return replace(job, weights=tuple(weights), groups=tuple(tuple(group) for group in groups if group))
