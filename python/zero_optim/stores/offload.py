"""The meaning of ``state_offload`` and ``device_budget``, and what they take of each memory. Integers only, no
tensors."""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero_optim_cli.choices import read_nbytes as read_nbytes

from ..params.layout import round_up

FRAMES = 2
"""Places on the device that pages take turns in: one is updated while another comes in, or goes out."""

FRAME_ALIGNMENT = 512
"""Bytes: where each tensor of a page begins in a frame. Kernels read 16 at a time."""

HOST_BUFFERS = 6
"""Buffers in host memory for pages on a disk: those that are being read, updated and written at a time."""

_CHOICES = "None, 'paged', 'cpu' or 'nvme:DIR'"


class Tier(enum.Enum):
    """The place of a page while no update uses it, and where it is updated."""

    DEVICE = None  # on the device; updated there
    PAGED = "paged"  # in host memory, but for pages within the budget; updated on the device
    CPU = "cpu"  # in host memory; updated there
    NVME = "nvme"  # in a file; updated on the device


@dataclass(frozen=True)
class Offload:
    """The choice of a state store.

    Attributes:
        device_budget: bytes of state that stay on the device, at most; None: as many as there is room for. Of
            ``Tier.PAGED`` alone, else 0.
        folder: where ``Tier.NVME`` has its file. Absolute: the process may go elsewhere before the file is made.
    """

    tier: Tier = Tier.DEVICE
    device_budget: int | None = 0
    folder: Path | None = None


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank's state, by where they are, with the places that pages take turns in."""

    device: int
    host: int
    disk: int


@dataclass
class Copied:
    """Bytes that a store has moved since it was made."""

    to_device: int = 0
    to_host: int = 0
    read: int = 0
    written: int = 0


def param_buffers(prefetch: int) -> int:
    """Count the buffers in host memory for parameters on a disk: of the unit in use, and of those ahead. An update
    takes three, as one shard is read, one updated and one written."""
    return max(3, prefetch + 1)


def read_param_offload(param_offload: str | None) -> Offload:
    """Read the argument of ``shard_module``. Raises ValueError, naming it."""
    with suppress(ValueError):
        offload = read_offload(param_offload)
        if offload.tier is not Tier.PAGED:
            return offload
    raise ValueError(f"param_offload must be None, 'cpu' or 'nvme:DIR', got {param_offload!r}")


def read_offload(state_offload: str | None, device_budget: int | str | None = None) -> Offload:
    """Read the arguments into one record. Raises ValueError, naming the argument."""
    if state_offload is not None and not isinstance(state_offload, str):
        raise ValueError(f"state_offload must be {_CHOICES}, got {state_offload!r}")
    if device_budget is not None and state_offload != Tier.PAGED.value:
        raise ValueError(f"device_budget is for state_offload='paged', not for {state_offload!r}: leave it out")
    if state_offload is None:
        return Offload()
    if state_offload == Tier.PAGED.value:
        if device_budget in (None, "auto"):
            return Offload(Tier.PAGED, None)
        nbytes = read_nbytes(device_budget) if isinstance(device_budget, str) else device_budget
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
            raise ValueError(f"device_budget must be bytes, a size such as '8GB', or 'auto', got {device_budget!r}")
        return Offload(Tier.PAGED, nbytes)
    if state_offload == Tier.CPU.value:
        return Offload(Tier.CPU)
    folder = state_offload.removeprefix("nvme:")
    if folder and folder != state_offload:
        return Offload(Tier.NVME, folder=Path(folder).expanduser().absolute())
    raise ValueError(f"state_offload must be {_CHOICES}, got {state_offload!r}")


def footprint(
    offload: Offload, pages: Sequence[int], mirrors: int = 0, visiting: Sequence[int] = (), *, room: int = 0
) -> Footprint:
    """Count what the state takes of each memory.

    Args:
        pages: bytes of the state of each shard.
        mirrors: bytes of the copies that ``Tier.CPU`` has on the host: of this rank's shards of gradients, and of
            parameters that are on the device.
        visiting: bytes of parameters off the device that visit it with each page; empty: none do.
        room: free bytes of the device: the budget where ``device_budget`` is None.
    """
    total = sum(pages)
    if offload.tier is Tier.CPU:
        return Footprint(0, total + mirrors, 0)
    free = room if offload.device_budget is None else offload.device_budget
    away = []
    for nbytes in pages:  # in the order in which they are made, each stays that still fits
        stays = offload.tier is Tier.DEVICE or nbytes <= free
        free -= nbytes if stays else 0
        away.append(0 if stays else nbytes)
    guests = [round_up(nbytes, FRAME_ALIGNMENT) for nbytes in visiting] or [0] * len(pages)
    frames = FRAMES * max(map(operator.add, away, guests), default=0)
    device = total - sum(away) + frames
    if offload.tier is Tier.NVME:
        return Footprint(device, HOST_BUFFERS * max(away, default=0), sum(away))
    return Footprint(device, sum(away), 0)
