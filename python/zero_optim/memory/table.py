"""Plans as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..stores.offload import Tier
from .fit import Change, cheapest_change
from .plan import LOCAL, PAGES, Plan

GB = 1e9
_NAMES = {LOCAL: "gradients not yet reduced", "unsharded": "units in flight", PAGES: "pages of state"}
_LAST = ("unsharded", LOCAL, PAGES, "activations", "padding")
_WIDTH = 28


def row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<{_WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)


def gigabytes(nbytes: float) -> str:
    """Of bytes, to 3 digits or more."""
    value = nbytes / GB
    digits = 3 if abs(value) < 0.995 else 2 if abs(value) < 99.95 else 1
    return f"{value:,.{digits}f}"


def figure(nbytes: float) -> str:
    """As gigabytes, or as smaller units for less than a megabyte of them, with the unit."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:,.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def kinds_of(plans: Sequence[Plan]) -> list[str]:
    """All kinds that any of the plans has, in the order to be shown."""
    known = list(dict.fromkeys(kind for made in plans for kind in made.memory))
    return sorted(known, key=lambda kind: _LAST.index(kind) if kind in _LAST else -1)


def memory_lines(plans: Sequence[Plan]) -> list[str]:
    """A column a plan, a line a kind: those that a rank of any of them has."""
    state = plans[0].state_kinds
    lines = [_line(kind, plans) for kind in state]
    lines.append(row("model state", [gigabytes(made.model_state) for made in plans]))
    shown = [kind for kind in kinds_of(plans) if kind not in state and any(made.memory.get(kind) for made in plans)]
    lines += [_line(kind, plans) for kind in shown]
    lines.append(row("on the device", [gigabytes(made.total) for made in plans]))
    if any(made.first_step for made in plans):
        lines.append(row("  in the first step", [gigabytes(made.most) for made in plans]))
    for name, values in (
        ("on the host", [made.host for made in plans]),
        ("on the disk", [made.disk for made in plans]),
    ):
        if any(values):
            lines.append(row(name, [gigabytes(value) for value in values]))
    return lines


def _line(kind: str, plans: Sequence[Plan]) -> str:
    cells = [gigabytes(made.memory[kind]) if kind in made.memory else "-" for made in plans]
    return row(name_of(kind), cells)


def name_of(kind: str) -> str:
    """Of a kind of memory, for people."""
    return _NAMES.get(kind, kind)


def of_one(made: Plan) -> str:
    """The table of one job, for a message."""
    job, where = made.job, ""
    if job.offload.tier is not Tier.DEVICE:
        where = f', state_offload="{job.offload.tier.value}"'
    ranks = "1 rank" if job.world == 1 else f"{job.world:,} ranks"
    head = f"{made.model.numel:,} parameters, stage {job.stage}, {ranks}{where}, {made.buckets:,} buckets; GB a rank:"
    return "\n".join([head, *memory_lines([made])])


def advice(made: Plan, device_memory: int | None) -> str:
    """A sentence: whether the job fits, and else the cheapest change with which it does."""
    if device_memory is not None and made.most <= device_memory:
        left = figure(device_memory - made.most)
        return f"Stage {made.job.stage} fits, with {left} of {figure(device_memory)} to spare."
    return said(cheapest_change(made, device_memory), device_memory)


def said_smallest(smallest: Plan | None, device_memory: int) -> str:
    """The smallest stage that fits, and its buckets, a sentence."""
    room = figure(device_memory)
    if smallest is None:
        return f"No stage fits into {room}."
    size = smallest.job.bucket_cap_mb
    buckets = "the default size" if size is None else f"{size:g} MiB (bucket_cap_mb={size:g})"
    return f"The smallest stage that fits into {room} is {smallest.job.stage}, with buckets of {buckets}."


def said(change: Change | None, device_memory: int | None) -> str:
    """Of the cheapest change, a sentence."""
    if change is None:
        less = "takes less" if device_memory is None else f"fits into {figure(device_memory)}"
        return f"No stage, no store and no number of ranks {less}: take a smaller model, or a smaller batch."
    less = "takes less" if device_memory is None else "fits"
    return f"The cheapest change that {less}: {change.what}. It takes {_whole(change.plan)}."


def _whole(made: Plan) -> str:
    """What a rank takes of every memory."""
    where = (("on the device", made.most), ("on the host", made.host), ("on the disk", made.disk))
    return ", ".join(f"{figure(nbytes)} a rank {place}" for place, nbytes in where if nbytes)
