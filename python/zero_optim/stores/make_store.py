"""Make the store that ``state_offload`` chooses."""

from __future__ import annotations

import math

import torch

from .disk_homes import make_disk_homes
from .host_homes import HostHomes
from .host_memory import HostMemory
from .host_store import HostStore
from .lanes import make_lanes
from .offload import Offload, Tier
from .paged_store import PagedStore
from .state_store import DeviceStore, StateStore

_RESERVE = 0.05
"""Share of the device's memory that a budget of "auto" leaves free: for fragments, and for larger steps."""


def make_store(
    offload: Offload, device: torch.device, rank: int, *, params_on_host: bool, threads: int = 1
) -> StateStore:
    """``params_on_host``: whether shards of parameters rest in host memory, and visit the device for each update.
    ``threads``: so many an update on the host uses.

    Raises OffloadError where there is no such folder, or no room in it.
    """
    if offload.tier is Tier.DEVICE and not params_on_host:
        return DeviceStore(device)
    memory, lanes = HostMemory(pinned=device.type == "cuda", device=device), make_lanes(device)
    if offload.tier is Tier.CPU:
        return HostStore(memory, lanes, threads)
    if offload.folder is not None:
        return PagedStore(device, lanes, make_disk_homes(offload.folder, rank, memory), 0)
    if offload.tier is Tier.DEVICE:
        return PagedStore(device, lanes, HostHomes(memory), math.inf)
    if offload.device_budget is not None:
        return PagedStore(device, lanes, HostHomes(memory), offload.device_budget)
    if device.type != "cuda":
        return PagedStore(device, lanes, HostHomes(memory), math.inf)  # the host's memory is the device's
    return PagedStore(device, lanes, HostHomes(memory), 0, lambda: _room(device))


def _room(device: torch.device) -> int:
    """Count the free bytes. Two steps are over, so torch's allocator already has what activations need."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(_RESERVE * total))
