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
from .grid import Rows, group_of_ranks

_WHERE = "the constructor, of DTensors"


@dataclass(frozen=True)
class TensorRanks:
    """This rank's place among them.

    Attributes:
        columns: the ranks with the same slice, as the whole job numbers them, slice by slice.
        data_parallel: this rank's column.
        slices: this rank's row: one rank for each slice.
    """

    columns: Rows
    data_parallel: Comm
    slices: Comm


def with_tensor_ranks(
    data_parallel: dist.ProcessGroup | None, mesh: dist.DeviceMesh | None
) -> tuple[dist.ProcessGroup | None, Rows | None]:
    """Collective. The group of all ranks that train together, and their columns, of which ``data_parallel`` is one.

    ``mesh``: that parameters are cut over; None: they are not, and the ranks are those of ``data_parallel``.

    Raises ValueError where the two do not go together.
    """
    if mesh is None:
        return data_parallel, None
    own = mesh.mesh.flatten().tolist()
    ranks = make_comm(data_parallel)
    rows: list[list[int]] = ranks.gather_objects(own, _WHERE)  # raises where some ranks have plain parameters
    every = sorted(rank for row in rows for rank in row)
    beside = make_comm(mesh.get_group()).gather_objects(every, _WHERE)
    with ranks.raising_together(_WHERE):
        _check(rows, ranks.ranks, mesh, beside)
    everyone = group_of_ranks(every, mesh.get_group())
    return everyone, tuple(zip(*rows, strict=True))


def _check(rows: list[list[int]], given: list[int], mesh: dist.DeviceMesh, beside: list[list[int]]) -> None:
    """``given``: the data-parallel ranks. ``beside``: all ranks, as each of this row counts them."""
    along = f"dimension {mesh.mesh_dim_names[0]!r} of their mesh" if mesh.mesh_dim_names else "their mesh"
    told = (
        f"parameters are DTensors over ranks {mesh.mesh.flatten().tolist()}, along {along}, and mesh, or process_group"
    )
    every = [rank for row in rows for rank in row]
    if len({*every}) < len(every):
        raise ValueError(
            f"{told}, gives ranks {given} to average over, several of the same. Give the other dimension, as "
            "mesh=world_mesh['dp']. If they are experts, give them a parameter group of their own, with "
            "mesh=world_mesh['edp']. Parameters that are sharded over data-parallel ranks already, as by fully_shard, "
            "cannot be sharded again: give them as they were before"
        )
    for line in (*rows, *zip(*rows, strict=False)):
        if len({len(row) for row in rows}) > 1 or list(line) != sorted(line):
            raise ValueError(
                f"{told}, gives ranks {given}, whose parameters are over {rows}: as many on each are needed, and in "
                "ascending order along both dimensions"
            )
    if any(ranks != beside[0] for ranks in beside):
        raise ValueError(
            f"{told}, gives each of these other ranks: together they make {beside}. Give all of them the same "
            "dimension of one mesh, as mesh=world_mesh['dp']"
        )


def make_tensor_ranks(everyone: Comm, columns: Rows | None, device: torch.device) -> TensorRanks | None:
    """Collective. The communicators between these ranks, connected for ``device``; None: parameters are not cut."""
    if columns is None:
        return None
    data_parallel = everyone.part(columns, "data-parallel ranks")
    slices = everyone.part(tuple(zip(*columns, strict=True)), "tensor-parallel ranks")
    data_parallel.connect(device)
    slices.connect(device)
    return TensorRanks(columns, data_parallel, slices)
