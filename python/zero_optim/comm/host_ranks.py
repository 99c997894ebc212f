"""The ranks of a ``Comm``, for a thread that agrees with the same thread of other ranks while the program goes on."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from ..errors import ClosedError, CollectiveError
from .collectives import Comm
from .transport import TorchTransport

# By ranks, as the whole job numbers them. Held weakly, as a Comm's.
_groups: dict[tuple[int, ...], weakref.ref[dist.ProcessGroup]] = {}


def forget_group(comm: Comm) -> None:
    """Let the next that needs a group of these ranks make a new one. Call it on every rank, where one has failed."""
    _groups.pop(tuple(comm.ranks), None)


class HostRanks:
    """Ranks that communicate over a gloo group of their own, whatever serves the devices: collectives of a thread have
    no place in the order of the program's. ``standstill`` does not look at them: the thread may wait for a slow disk.
    """

    def __init__(self, comm: Comm) -> None:
        """Collective, where these ranks have no such group yet."""
        self.rank, self.world_size, self.ranks = comm.rank, comm.world_size, comm.ranks
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        if self.world_size > 1:
            key = tuple(comm.ranks)
            group = _groups.get(key, lambda: None)()
            # The program may have destroyed its process group, and made another of the same ranks.
            if group is None or group not in dist.distributed_c10d._world.pg_names:
                _groups[key] = weakref.ref(comm.new_host_group())
            self._group = _groups[key]

    def gather_objects(self, value: Any, where: str) -> list[Any]:
        """Every rank's ``value``, in rank order. Raises CollectiveError where a rank has died."""
        if self._group is None:
            return [value]
        group = self._group()
        if group is None:
            raise ClosedError(f"the process group was destroyed during {where}: call checkpoint.wait() before")
        try:
            return TorchTransport().gather_objects(value, group)
        except RuntimeError as error:
            raise CollectiveError(f"{where}: {error}. Another rank died, or was too slow") from error
