"""Plans as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..drawing.figures import SizeUnit, count, row, size, unit_for
from ..stats import TELEMETRY
from ..stores.offload import Tier
from .fit import Change, cheapest_change
from .plan import LOCAL, MATRICES, PAGES, Job, Plan

_LAST = ("unsharded", LOCAL, TELEMETRY, PAGES, "activations", MATRICES, "padding")


def unit_of(plans: Sequence[Plan]) -> SizeUnit:
    """Choose the unit in which plans are shown: by the largest figure of any."""
    return unit_for(max(max(made.most, made.host, made.disk, made.communicated) for made in plans))


def kinds_of(plans: Sequence[Plan]) -> list[str]:
    """All kinds that any of the plans has, in the order to be shown."""
    known = list(dict.fromkeys(kind for made in plans for kind in made.memory))
    return sorted(known, key=lambda kind: _LAST.index(kind) if kind in _LAST else -1)


def memory_lines(plans: Sequence[Plan], unit: SizeUnit, *, by_kind: bool = True) -> list[str]:
    """Write a column for each plan, and a line for each kind of bytes that any of them has.

    ``by_kind``: False: of the kinds that are not activations only sums.
    """
    state = plans[0].state_kinds
    lines = [_line(kind, plans, unit) for kind in state] if by_kind else []
    lines.append(row("model state", [unit.cell(made.model_state) for made in plans]))
    shown = [kind for kind in kinds_of(plans) if kind not in state and any(made.memory.get(kind) for made in plans)]
    lines += [_line(kind, plans, unit) for kind in shown if by_kind or kind == "activations"]
    lines.append(row("on the device", [unit.cell(made.total) for made in plans]))
    if any(made.first_step for made in plans):
        lines.append(row("  in the first step", [unit.cell(made.most) for made in plans]))
    for name, values in (
        ("on the host", [made.host for made in plans]),
        ("on the disk", [made.disk for made in plans]),
    ):
        if any(values):
            lines.append(row(name, [unit.cell(value) for value in values]))
    return lines


def _line(kind: str, plans: Sequence[Plan], unit: SizeUnit) -> str:
    return row(kind, [unit.cell(made.memory[kind]) if kind in made.memory else "-" for made in plans])


def of_one(made: Plan) -> str:
    """The table of one job, for a message."""
    job, where = made.job, ""
    if job.offload.tier is not Tier.DEVICE:
        where = f', state_offload="{job.offload.tier.value}"'
    unit, buckets = unit_of([made]), count(made.buckets, "bucket")
    head = f"{made.model.numel:,} parameters, stage {job.stage}, {ranks_of(job)}{where}, {buckets}; {unit.name} a rank:"
    return "\n".join([head, *memory_lines([made], unit)])


def ranks_of(job: Job) -> str:
    """Describe the ranks of a job, and what they share."""
    ranks = count(job.world, "rank")
    ranks += f", {job.tensor} tensor-parallel" if job.tensor > 1 else ""
    ranks += f", {job.pipeline} stages of a pipeline" if job.pipeline > 1 else ""
    return ranks + (f" in {job.replicas} replicas" if job.replicas > 1 else "")


def verdict(smallest: Plan | None, most_sharded: Plan, device_memory: int) -> str:
    """Say whether a job fits, in a sentence or two: at which stage, else with which change.

    Args:
        smallest: at the smallest stage that fits; None: at none.
        most_sharded: whose changes are tried then.
    """
    room = size(device_memory)
    if smallest is None:
        change = said(cheapest_change(most_sharded, device_memory), device_memory)
        return f"Does not fit into {room} at any stage. {change}"
    cap, left = smallest.job.bucket_cap_mb, size(device_memory - smallest.most)
    buckets = "" if cap is None else f" with buckets of {cap:g} MiB (bucket_cap_mb={cap:g})"
    return f"Fits into {room} at stage {smallest.job.stage}{buckets}: {size(smallest.most)} a rank, {left} to spare."


def said(change: Change | None, device_memory: int | None) -> str:
    """Describe the cheapest change, in a sentence."""
    if change is None:
        less = "takes less" if device_memory is None else f"fits into {size(device_memory)}"
        return f"No stage, no store and no number of ranks {less}: take a smaller model, or a smaller batch."
    less = "takes less" if device_memory is None else "fits"
    return f"The cheapest change that {less}: {change.what}. It takes {_whole(change.plan)}."


def _whole(made: Plan) -> str:
    """Count what a rank takes of every memory."""
    where = (("on the device", made.most), ("on the host", made.host), ("on the disk", made.disk))
    return ", ".join(f"{size(nbytes)} a rank {place}" for place, nbytes in where if nbytes)
