"""Ranks in a grid: those of a row share tensors among them, those of a column hold the same.

A ``DeviceMesh`` of two dimensions is a grid. Two nodes of four ranks, where each node shares among its own ranks, over
its fast links, and repeats what the other has::

                 shard 0   shard 1   shard 2   shard 3
    replica 0    rank 0    rank 1    rank 2    rank 3
    replica 1    rank 4    rank 5    rank 6    rank 7
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import groups
from .collectives import Comm
from .transport import STREAMS, backends

Rows = tuple[tuple[int, ...], ...]
"""Ranks as the whole job numbers them, by replica and by shard."""

_REPLICATE, _SHARD = "replicate", "shard"  # in the names of dimensions
# Groups of meshes that are a part of the job, by ranks and back-ends.
_of_meshes: dict[tuple[tuple[int, ...], str], groups.Reference] = {}


@dataclass(frozen=True)
class Grid:
    """The grid of which this rank is a part.

    Attributes:
        within: this rank's row: the ranks that share.
        across: this rank's column: the ranks that hold what this one holds.
    """

    within: Comm
    across: Comm


def make_grid(everyone: Comm, rows: Rows | None, device: torch.device) -> Grid | None:
    """Collective. Make the communicators of a grid, connected for ``device``; None: without ``rows`` nobody repeats."""
    if rows is None:
        return None
    within = everyone.part(rows, "within a replica")
    across = everyone.part(tuple(zip(*rows, strict=True)), "across replicas")
    within.connect(device)
    across.connect(device)
    return Grid(within, across)


def read_rows(mesh: dist.DeviceMesh | None, *, shares: bool = True) -> Rows | None:
    """Read the rows of a grid off a mesh. None: the mesh has one dimension, or repeats nothing, so that all its ranks
    share; or, without ``shares``, as at stage 0, none does.

    The dimension that repeats has "replicate" in its name, or the other has "shard"; else it is the first, as in FSDP2.

    Raises ValueError for a mesh of more dimensions, and for one whose ranks cannot be used so.
    """
    if mesh is None or mesh.ndim == 1:
        return None
    names = list(mesh.mesh_dim_names or ("0", "1", *("" for _ in range(mesh.ndim - 2))))
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh must have one dimension, or two, of which the first replicates and the second shards; this one has "
            f"{mesh.ndim}: {names}. Give a part of it, as mesh['dp_replicate', 'dp_shard']"
        )
    repeating = [number for number, name in enumerate(names) if _REPLICATE in name]
    sharing = [number for number, name in enumerate(names) if _SHARD in name]
    if len(repeating) == 2 or len(sharing) == 2:
        raise ValueError(f"one dimension of mesh has to replicate, and the other to shard; these are {names}")
    first = repeating[0] if repeating else 1 - sharing[0] if sharing else 0
    table = mesh.mesh if first == 0 else mesh.mesh.T
    rows: Rows = tuple(tuple(row) for row in table.tolist())
    for line in (*rows, *zip(*rows, strict=True)):
        if list(line) != sorted(line):
            raise ValueError(f"the ranks of mesh along {names} are {list(line)}: give them in ascending order")
    if len(rows) == 1 or not shares:
        return None
    if len(rows[0]) == 1:
        raise ValueError(
            f"dimension {names[1 - first]!r} of mesh, which shards, has one rank: nothing is shared there. Train "
            "with stage=0, which shares nothing"
        )
    return rows


def group_of(process_group: dist.ProcessGroup | None, mesh: dist.DeviceMesh | None) -> dist.ProcessGroup | None:
    """Collective. Make the group of all ranks of a group or a mesh. None: the default one.

    A mesh that cannot be used gives the group of its last dimension: so the ranks can raise together.
    """
    if process_group is not None or mesh is None:
        return process_group
    if not isinstance(mesh, dist.DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}: give a DeviceMesh, as init_device_mesh makes it")
    if mesh.ndim != 2:
        return mesh.get_group(mesh.ndim - 1)
    return group_of_ranks(sorted(mesh.mesh.flatten().tolist()), mesh.get_group(1))


def group_along(given: dist.DeviceMesh | dist.ProcessGroup, option: str, what: str, example: str) -> dist.ProcessGroup:
    """Read an option that is a mesh of one dimension, or a group. ``what``: names the ranks along it, in messages.

    Raises ValueError for a mesh of several dimensions, TypeError for what is neither mesh nor group.
    """
    if isinstance(given, dist.DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"{option} is a mesh of {given.ndim} dimensions, {given.mesh_dim_names}: give the one along which "
                f"{what} are, as {option}={example}"
            )
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"{option} is a {type(given).__name__}: give a DeviceMesh, as {example}, or a process group")
    return given


def group_of_ranks(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Collective over ``ranks``. Make a group of these, or return the one that was made before, while it lives.

    ``like``: a group over the same back-ends. Raises ValueError where there can be no such group.
    """
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} is not in mesh, whose ranks are {ranks}: call it on these only")
    if STREAMS.splits_communicators(like):
        raise ValueError(
            f"mesh has {len(ranks)} of {dist.get_world_size()} ranks, and init_process_group was given a device_id: so "
            "a group of some ranks can be made by all ranks alone. Leave device_id out"
        )
    key = tuple(ranks), str(backends(like))
    found = groups.alive(_of_meshes.get(key))
    if found is None:
        found = STREAMS.group_of(ranks, like)
        _of_meshes[key] = weakref.ref(found)
    return found
