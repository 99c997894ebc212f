"""Search for what fits: the largest model, the smallest stage and bucket, and the cheapest change that makes a job
fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from zero_optim_cli.choices import MOST_PARAMETERS

from ..rules.codec import codecs_for
from ..rules.update_rule import UpdateRule, has_master
from ..stores.offload import Tier, read_offload
from .decoders import fewest_parameters, gpt_of
from .plan import ON_THE_HOST, Job, Plan, plan
from .shapes import ModelShapes, of_decoder

BUCKET_MB = (None, 16, 8, 4, 2, 1)
"""Sizes that are tried: the default first."""

_MOST_TIMES = 64  # at most so many times the job's ranks are tried
_FEWEST = 10**6

_STORES = (Tier.PAGED, Tier.CPU)


@dataclass(frozen=True)
class Change:
    """``what`` to change, as a user writes it, and the plan that then holds."""

    what: str
    plan: Plan


def _unchanged(model: ModelShapes) -> ModelShapes:
    return model


def largest_model(
    job: Job,
    dtype: torch.dtype,
    device_memory: int,
    change: Callable[[ModelShapes], ModelShapes] = _unchanged,
) -> int:
    """Find the largest GPT (``gpt_of``) with which ``job`` fits. Returns its parameters, to 3 digits; 0: none does.

    ``change``: what becomes of a GPT before it is planned, as by ``with_lora``.
    """

    def fits(parameters: int) -> bool:
        return plan(change(of_decoder(gpt_of(parameters), dtype)), job).most <= device_memory

    low, high = max(_FEWEST, fewest_parameters(job.pipeline)), MOST_PARAMETERS
    if not fits(low):
        return 0
    while high > low * 1.001:
        middle = int((low * high) ** 0.5)
        low, high = (middle, high) if fits(middle) else (low, middle)
    digits = 10 ** (len(str(low)) - 3)
    return low // digits * digits


def smallest_stage(model: ModelShapes, job: Job, device_memory: int) -> Plan | None:
    """Find the first stage that fits, with the largest of ``BUCKET_MB`` with which it does; None: no stage does."""
    for stage in _stages(model, 0):
        sizes = BUCKET_MB if job.bucket_cap_mb is None and stage < 3 else (job.bucket_cap_mb,)  # a unit is a bucket
        for bucket_cap_mb in sizes:
            made = plan(model, replace(job, stage=stage, bucket_cap_mb=bucket_cap_mb))
            if made.most <= device_memory:
                return made
            if made.model_state > device_memory:
                break  # it does not fit with buckets of any size
    return None


def _stages(model: ModelShapes, first: int) -> range:
    return range(first, 4 if model.units else 3)


def changes(model: ModelShapes, job: Job) -> Iterator[Change]:
    """List what would take less memory on the device, the cheapest first: what is shared, what is computed again, how
    precise the state is, where it is, how many ranks there are."""
    stages = _stages(model, job.stage + 1 if job.world > 1 else 4)
    for stage in stages:
        yield _change(model, replace(job, stage=stage), _stage(stage))
    most = stages[-1] if stages else job.stage
    shared = f"{_stage(most)} and " if most != job.stage else ""
    best = replace(job, stage=most)
    if job.batch is not None and not job.batch.checkpointing:
        best = replace(best, batch=replace(job.batch, checkpointing=True))
        shared += "activation checkpointing"
        yield _change(model, best, shared)
        shared += " and "
    if job.replicas > 1 and most >= 1:
        yield _change(model, replace(best, replicas=1), f"{shared}a mesh of one dimension, so that all ranks share")
    for form, rule in _forms(model, job):
        yield _change(model, replace(best, rule=rule), f"{shared}{form}")
    if job.offload.tier is Tier.DEVICE and job.device_memory != ON_THE_HOST:
        for tier in _STORES:
            offloaded = replace(best, offload=read_offload(tier.value))
            yield _change(model, offloaded, f'{shared}state_offload="{tier.value}"')
            if most >= 3 and not job.param_offload:
                both = f'state_offload="{tier.value}" and shard_module(param_offload="cpu")'
                yield _change(model, replace(offloaded, param_offload=True), shared + both)
    times = 2
    while times <= _MOST_TIMES and (most >= 1 or model.units):
        more = replace(best, world=job.world * times, stage=max(most, _stages(model, 0)[-1]), rank=None)
        yield _change(model, more, f"{_stage(more.stage)} and {more.world:,} ranks")
        times *= 2


def _forms(model: ModelShapes, job: Job) -> Iterator[tuple[str, UpdateRule]]:
    """Give smaller forms of state, the more precise first, unless some of it has a form already, or there are several
    rules. Averages keep theirs."""
    rule = job.rule
    several = any(job.rule_of(parameter) is not rule for parameter in model.parameters)
    if several or not rule.codecs.keys() <= {*rule.averages}:
        return
    masters = {parameter.dtype for parameter in model.parameters if has_master(rule, parameter.dtype)}
    forms = [("fp32", "int8")]
    if masters == {torch.bfloat16}:
        forms = [("split", "fp32"), ("split8", "fp32"), ("split", "int8"), ("split8", "int8")]
    for master, state_dtype in forms:
        codecs = codecs_for(rule.tensors, rule.nonnegative, master, state_dtype)
        words = {"master": master, "state_dtype": state_dtype}
        said = ", ".join(f'{option}="{form}"' for option, form in words.items() if form != "fp32")
        yield said, rule.with_codecs(codecs)


def _stage(stage: int) -> str:
    return "zero_optim.shard_module (stage 3)" if stage == 3 else f"stage={stage}"


def _change(model: ModelShapes, job: Job, what: str) -> Change:
    return Change(what, plan(model, job))


def cheapest_change(made: Plan, device_memory: int | None) -> Change | None:
    """The first of ``changes`` that fits into ``device_memory`` and takes less than ``made``; None: none does.

    ``device_memory``: None: it is not known, and the first that takes less is given.
    """
    for change in changes(made.model, made.job):
        if change.plan.most < made.most and (device_memory is None or change.plan.most <= device_memory):
            return change
    return None
