"""Tensor-parallel ranks: which of all have the same slices, and which have the others.

Six ranks, where three have each slice of two::

                     slice 0   slice 1
    data-parallel 0  rank 0    rank 1        a row: all slices; gradients of what all of it have are added up along it
    data-parallel 1  rank 2    rank 3
    data-parallel 2  rank 4    rank 5        a column: the same slice; gradients are averaged along it, and state shared
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collectives import Comm, make_comm
from .grid import Rows, group_along, group_of_ranks

_WHERE = "the constructor, of DTensors or with tensor_parallel"


@dataclass(frozen=True)
class RowRanks:
    """The ranks that have all slices of what this one has a slice of, one each.

    Attributes:
        ranks: as the whole job numbers them, in the order of the slices.
        told: who says so, for messages.
        plain: whether slices are plain tensors, of which nobody knows how they make a whole; else ``DTensor``s.
    """

    group: dist.ProcessGroup
    ranks: list[int]
    told: str
    plain: bool


def read_row(
    tensor_parallel: dist.DeviceMesh | dist.ProcessGroup | None, mesh: dist.DeviceMesh | None
) -> RowRanks | None:
    """Read this rank's row off an option, or off the mesh that parameters are over. None: no parameter has slices.

    Raises TypeError, or ValueError where the two say different things.
    """
    of_mesh = None
    if mesh is not None:
        along = f"dimension {mesh.mesh_dim_names[0]!r} of their mesh" if mesh.mesh_dim_names else "their mesh"
        told = f"parameters are DTensors over ranks {_ranks(mesh)}, along {along}"
        of_mesh = RowRanks(mesh.get_group(), _ranks(mesh), told, plain=False)
    if tensor_parallel is None:
        return of_mesh
    group = group_along(tensor_parallel, "tensor_parallel", "the slices", "mesh['tp']")
    ranks = _ranks(tensor_parallel)
    given = RowRanks(group, ranks, f"tensor_parallel gives ranks {ranks}", plain=True)
    if of_mesh is not None:
        if given.ranks != of_mesh.ranks:
            raise ValueError(f"{of_mesh.told}, and {given.told}: leave tensor_parallel out. DTensors say it themselves")
        return of_mesh
    return given if len(given.ranks) > 1 else None


@dataclass(frozen=True)
class TensorRanks:
    """This rank's place among tensor-parallel ranks.

    Attributes:
        data_parallel: this rank's column.
        slices: this rank's row: one rank for each slice.
        plain: see ``RowRanks``.
    """

    data_parallel: Comm
    slices: Comm
    plain: bool = False


def _ranks(of: dist.DeviceMesh | dist.ProcessGroup) -> list[int]:
    """List the ranks: of a group in ascending order, of a mesh as it was made."""
    if isinstance(of, dist.DeviceMesh):
        return list(of.mesh.flatten().tolist())
    return list(dist.get_process_group_ranks(of))


def with_tensor_ranks(
    data_parallel: dist.ProcessGroup | None, row: RowRanks | None
) -> tuple[dist.ProcessGroup | None, Rows | None]:
    """Collective. Make the group of all ranks that train together, and list its columns; ``data_parallel`` is one.

    Without a ``row`` nothing is cut, and the group is ``data_parallel``.

    Raises ValueError where the two do not go together.
    """
    if row is None:
        return data_parallel, None
    ranks = make_comm(data_parallel)
    rows: list[list[int]] = ranks.gather_objects(row.ranks, _WHERE)  # raises where some ranks have plain parameters
    every = sorted(rank for of_rank in rows for rank in of_rank)
    beside = make_comm(row.group).gather_objects(every, _WHERE)
    with ranks.raising_together(_WHERE):
        _check(rows, ranks.ranks, row, beside)
    everyone = group_of_ranks(every, row.group)
    return everyone, tuple(zip(*rows, strict=True))


def _check(rows: list[list[int]], given: list[int], row: RowRanks, beside: list[list[int]]) -> None:
    """Check the rows. ``given``: the data-parallel ranks. ``beside``: all ranks, as each of this row lists them."""
    told = f"{row.told}, and mesh, or process_group"
    every = [rank for of_rank in rows for rank in of_rank]
    if len({*every}) < len(every):
        raise ValueError(
            f"{told}, gives ranks {given} to average over, several of the same. Give the other dimension, as "
            "mesh=world_mesh['dp']. If they are experts, give them a parameter group of their own, with "
            "mesh=world_mesh['edp']. Parameters that are sharded over data-parallel ranks already, as by fully_shard, "
            "cannot be sharded again: give them as they were before"
        )
    for line in (*rows, *zip(*rows, strict=False)):
        if len({len(of_rank) for of_rank in rows}) > 1 or list(line) != sorted(line):
            raise ValueError(
                f"{told}, gives ranks {given}, whose parameters are over {rows}: as many on each are needed, and in "
                "ascending order along both dimensions"
            )
    if any(ranks != beside[0] for ranks in beside):
        raise ValueError(
            f"{told}, gives each of these other ranks: together they make {beside}. Give all of them the same "
            "dimension of one mesh, as mesh=world_mesh['dp']"
        )


def make_tensor_ranks(
    everyone: Comm, columns: Rows | None, device: torch.device, *, plain: bool = False
) -> TensorRanks | None:
    """Collective. Make the communicators of these ranks, connected for ``device``; None: parameters are not cut."""
    if columns is None:
        return None
    data_parallel = everyone.part(columns, "data-parallel ranks")
    slices = everyone.part(tuple(zip(*columns, strict=True)), "tensor-parallel ranks")
    data_parallel.connect(device)
    slices.connect(device)
    return TensorRanks(data_parallel, slices, plain)
