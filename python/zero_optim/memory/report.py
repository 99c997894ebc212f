"""Plans as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..figures import SizeUnit, count, row, size, unit_for
from ..stores.offload import Tier
from .plan import LOCAL, PAGES, Job, Plan, plan

_LAST = ("unsharded", LOCAL, PAGES, "activations", "padding")


def unit_of(plans: Sequence[Plan]) -> SizeUnit:
    """Choose the unit in which plans are shown: by the largest figure of any."""
    return unit_for(max(max(made.most, made.host, made.disk) for made in plans))


def memory_lines(plans: Sequence[Plan], unit: SizeUnit, *, by_kind: bool = True) -> list[str]:
    """Write a column for each plan, and a line for each kind of bytes that any of them has.

    ``by_kind``: False: of the kinds that are not activations only sums.
    """
    known = dict.fromkeys(kind for made in plans for kind in made.memory)
    kinds = sorted(known, key=lambda kind: _LAST.index(kind) if kind in _LAST else -1)
    of_kind = {kind: [made.memory.get(kind) for made in plans] for kind in kinds}
    state = plans[0].state_kinds
    rows: dict[str, Sequence[int | None]] = {kind: of_kind[kind] for kind in state if by_kind}
    rows["model state"] = [made.model_state for made in plans]
    for kind, column in of_kind.items():
        if kind not in state and any(column) and (by_kind or kind == "activations"):
            rows[kind] = column
    rows["on the device"] = [made.total for made in plans]
    if any(made.first_step for made in plans):
        rows["  in the first step"] = [made.most for made in plans]
    for where, values in (("host", [made.host for made in plans]), ("disk", [made.disk for made in plans])):
        if any(values):
            rows[f"on the {where}"] = values
    return [row(name, ["-" if it is None else unit.cell(it) for it in values]) for name, values in rows.items()]


def of_one(made: Plan) -> str:
    """The table of one job, for a message."""
    job, where = made.job, ""
    if job.offload.tier is not Tier.DEVICE:
        where = f', state_offload="{job.offload.tier.value}"'
    unit, buckets = unit_of([made]), count(made.buckets, "bucket")
    head = f"{made.model.numel:,} parameters, stage {job.stage}, {ranks_of(job)}{where}, {buckets}; {unit.name} a rank:"
    return "\n".join([head, *memory_lines([made], unit)])


def ranks_of(job: Job) -> str:
    """Describe the ranks of a job."""
    ranks = count(job.world, "rank")
    ranks += f", {job.tensor} tensor-parallel" if job.tensor > 1 else ""
    ranks += f", experts over {job.expert_parallel}" if job.expert_parallel > 1 else ""
    ranks += f", {job.pipeline} stages of a pipeline" if job.pipeline > 1 else ""
    ranks += f" in {job.replicas} replicas" if job.replicas > 1 else ""
    return ranks + (", state over all" if job.replicas > 1 and job.state_over == "all" else "")


def remedy(made: Plan, device_memory: int) -> str:
    """Describe what takes less memory than ``made``: the first higher stage that fits, else what else to change."""
    job, model = made.job, made.model
    for stage in range(job.stage + 1, 4 if model.units else 3) if job.world > 1 else ():
        fits = plan(model, replace(job, stage=stage))
        if fits.most <= device_memory:
            how = "zero_optim.shard_module (stage 3)" if stage == 3 else f"stage={stage}"
            return f"{how} fits: {size(fits.most)} a rank."
    recompute = "activation checkpointing, " * (job.batch is not None and not job.batch.checkpointing)
    forms = 'state_dtype="int8", state_offload="paged" or "cpu"'
    return f"What takes less: {recompute}{forms}, more ranks, a smaller batch."


def verdict(plans: Sequence[Plan], device_memory: int) -> str:
    """Describe at which stage a job fits, the first of these plans that does; else what takes less than the last."""
    room, smallest = size(device_memory), next((made for made in plans if made.most <= device_memory), None)
    if smallest is None:
        return f"Does not fit into {room} at any stage below. {remedy(plans[-1], device_memory)}"
    left = size(device_memory - smallest.most)
    return f"Fits into {room} at stage {smallest.job.stage}: {size(smallest.most)} a rank, {left} to spare."
