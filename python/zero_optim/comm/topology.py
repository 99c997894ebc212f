"""Which ranks do what, read off the arguments: who shards, who replicates, who has which slices and experts.

``DeviceMesh``es and process groups come in; ranks as the whole job numbers them, and the groups of these, come out.
``make_sharding`` makes the communicators. A job is a matrix of ranks, with several names for its lines:

- HSDP (``Grid``): the ranks of a row shard state among them, those of a column replicate each other.
- Tensor parallelism (``TensorRanks``): a row has all slices of a parameter, one each. A column has the same slice:
  its ranks average gradients and shard the state.
- Experts (``ExpertRanks``): for some parameters alone, a row has all experts, and a column the same ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import groups
from .collectives import Comm, make_comm
from .transport import backends, new_group_of

K = TypeVar("K")
Rows = tuple[tuple[int, ...], ...]
"""Ranks as the whole job numbers them, by row and column of a matrix."""

STATE_OVER = ("shard", "all")
"""The dimensions of a mesh over whose ranks state is sharded: that which shards, or both."""

_WHERE = "the constructor, of DTensors or with tensor_parallel"
# Groups of meshes that are a part of the job, by ranks and back-ends.
_of_meshes: dict[tuple[tuple[int, ...], str], groups.Reference] = {}


# -- groups of meshes --------------------------------------------------------------------------------------------------


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
                f"{what} are, as {example}"
            )
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"{option} is a {type(given).__name__}: give a DeviceMesh, as {example}, or a process group, of which this "
            "rank is"
        )
    return given


def group_of_ranks(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Collective over ``ranks``. Make a group of these, or return the one that was made before, while it lives.

    ``like``: a group over the same back-ends. Raises ValueError where there can be no such group.
    """
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} is not in mesh, whose ranks are {ranks}: call it on these only")
    key = tuple(ranks), str(backends(like))
    found = groups.alive(_of_meshes.get(key))
    if found is None:
        found = new_group_of(ranks, like, "world")
        _of_meshes[key] = weakref.ref(found)
    return found


# -- HSDP: rows that shard, columns that replicate ---------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """The grid of which this rank is a part.

    Attributes:
        within: this rank's row: the ranks that shard.
        across: this rank's column: the ranks that hold the same shard.
        over_all: whether they split that shard once more, so that state is sharded over all ranks of the grid.
    """

    within: Comm
    across: Comm
    over_all: bool = False


def make_matrix(world: Comm, lines: Rows, device: torch.device, along: str, across: str) -> tuple[Comm, Comm]:
    """Collective. Make this rank's communicators along its line and across the lines, connected for ``device``."""
    matrix = world.part(lines, along), world.part(tuple(zip(*lines, strict=True)), across)
    for comm in matrix:
        comm.connect(device)
    return matrix


def read_rows(mesh: dist.DeviceMesh | None, *, shards: bool = True, over_all: bool = False) -> Rows | None:
    """Read the rows of a grid off a mesh. None: the mesh has one dimension, or replicates nothing, so that all its
    ranks shard; or, without ``shards``, as at stage 0, none does. ``over_all``: with one rank in a row all shard, too.

    The dimension that replicates has "replicate" in its name, or the other has "shard"; else it is the first, as in
    FSDP2.

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
    replicating = [number for number, name in enumerate(names) if "replicate" in name]
    sharding = [number for number, name in enumerate(names) if "shard" in name]
    if len(replicating) == 2 or len(sharding) == 2:
        raise ValueError(f"one dimension of mesh has to replicate, and the other to shard; these are {names}")
    first = replicating[0] if replicating else 1 - sharding[0] if sharding else 0
    table = mesh.mesh if first == 0 else mesh.mesh.T
    rows: Rows = tuple(tuple(row) for row in table.tolist())
    for line in (*rows, *zip(*rows, strict=True)):
        if list(line) != sorted(line):
            raise ValueError(f"the ranks of mesh along {names} are {list(line)}: give them in ascending order")
    if len(rows) == 1 or not shards or (over_all and len(rows[0]) == 1):
        return None
    if len(rows[0]) == 1:
        raise ValueError(
            f"dimension {names[1 - first]!r} of mesh, which shards, has one rank: nothing is sharded there. Train "
            'with stage=0, which shards nothing, or at stage 1 or 2 with state_over="all"'
        )
    return rows


# -- tensor parallelism ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowRanks:
    """The ranks that have all slices of what this one has a slice of, one each.

    Attributes:
        ranks: as the whole job numbers them, in the order of the slices.
        source: where they were read, for messages.
        plain: whether slices are plain tensors, of which it is unknown how they make a whole; else ``DTensor``s.
    """

    group: dist.ProcessGroup
    ranks: list[int]
    source: str
    plain: bool


def read_row(
    tensor_parallel: dist.DeviceMesh | dist.ProcessGroup | None, mesh: dist.DeviceMesh | None
) -> RowRanks | None:
    """Read this rank's row off an option, or off the mesh that parameters are over. None: no parameter has slices.

    Raises TypeError, or ValueError where the two differ.
    """
    of_mesh = None
    if mesh is not None:
        along = f"dimension {mesh.mesh_dim_names[0]!r} of their mesh" if mesh.mesh_dim_names else "their mesh"
        ranks = mesh.mesh.flatten().tolist()
        source = f"parameters are DTensors over ranks {ranks}, along {along}"
        of_mesh = RowRanks(mesh.get_group(), ranks, source, plain=False)
    if tensor_parallel is None:
        return of_mesh
    group = group_along(tensor_parallel, "tensor_parallel", "the slices", "mesh['tp']")
    if isinstance(tensor_parallel, dist.DeviceMesh):
        ranks = tensor_parallel.mesh.flatten().tolist()  # as it was made; those of a group ascend
    else:
        ranks = dist.get_process_group_ranks(group)
    given = RowRanks(group, ranks, f"tensor_parallel gives ranks {ranks}", plain=True)
    if of_mesh is None:
        return given if len(given.ranks) > 1 else None
    if given.ranks != of_mesh.ranks:
        raise ValueError(f"{of_mesh.source}, and {given.source}: leave tensor_parallel out, as DTensors have a mesh")
    return of_mesh


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


def _check_rows(rows: list[list[int]], given: list[int], row: RowRanks, beside: list[list[int]]) -> None:
    """Check the rows. ``given``: the data-parallel ranks. ``beside``: all ranks, as each of this row lists them."""
    source = f"{row.source}, and mesh, or process_group"
    every = [rank for of_rank in rows for rank in of_rank]
    if len({*every}) < len(every):
        raise ValueError(
            f"{source}, gives ranks {given} to average over, several of the same. Give the other dimension, as "
            "mesh=world_mesh['dp']. If they are experts, give them a parameter group of their own, with "
            "mesh=world_mesh['edp'], and shard_module experts={'experts': world_mesh['edp']}. Parameters that are "
            "sharded over data-parallel ranks already, as by fully_shard, cannot be sharded again: give them as they "
            "were before"
        )
    for line in (*rows, *zip(*rows, strict=False)):
        if len({len(of_rank) for of_rank in rows}) > 1 or list(line) != sorted(line):
            raise ValueError(
                f"{source}, gives ranks {given}, whose parameters are over {rows}: as many on each are needed, and in "
                "ascending order along both dimensions"
            )
    if any(ranks != beside[0] for ranks in beside):
        raise ValueError(
            f"{source}, gives each of these other ranks: together they make {beside}. Give all of them the same "
            "dimension of one mesh, as mesh=world_mesh['dp']"
        )


# -- all of it ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """The places of the ranks, but for those of experts: these are read off each parameter group.

    Attributes:
        rows: of the grid, see ``Grid``; None: all that average gradients shard, and none replicates.
        over_all: see ``Grid``.
        columns: the ranks with the same slices, see ``TensorRanks``; None: nothing is cut.
        plain: whether slices are plain tensors, see ``RowRanks``.
        explicit_tp: whether the user has passed the ranks that have slices. Megatron marks uncut parameters, too.
    """

    rows: Rows | None = None
    over_all: bool = False
    columns: Rows | None = None
    plain: bool = False
    explicit_tp: bool = False

    @property
    def slices(self) -> list[int]:
        """The ranks of this rank's row, one a slice; none where nothing is cut."""
        return own_row(self.columns or ())

    def shard_count(self, world: Comm) -> int:
        """Count the ranks that one state is sharded over."""
        return len(self.rows[0]) if self.rows else world.world_size // len(self.columns or [0])

    def averaging(self, world: Comm) -> list[int]:
        """List the ranks of ``world`` that average gradients with this rank."""
        return next((list(column) for column in self.columns or () if dist.get_rank() in column), world.ranks)

    def described(self) -> dict[str, Any]:
        """Describe what all ranks have to agree on. Of a grid within a column that is its shape alone."""
        if self.columns is None:
            return {"mesh": self.rows}
        shape = None if self.rows is None else [len(row) for row in self.rows]
        return {"mesh": shape, "tensor-parallel ranks": len(self.columns)}


def read_topology(
    averaging: dist.ProcessGroup | None, row: RowRanks | None, *, explicit_tp: bool
) -> tuple[dist.ProcessGroup | None, Topology]:
    """Collective. Make the group of all ranks that train together, and read their places, but for a grid.

    Args:
        averaging: the ranks that average gradients with this one; None: those of the default group.
        row: the ranks that have slices; None: nothing is cut.
        explicit_tp: whether the user has passed which ranks have slices, or that none has.

    Raises ValueError where the two do not go together.
    """
    if row is None:
        return averaging, Topology(explicit_tp=explicit_tp)
    ranks = make_comm(averaging)
    rows: list[list[int]] = ranks.gather_objects(row.ranks, _WHERE)  # raises where some ranks have plain parameters
    every = sorted(rank for of_rank in rows for rank in of_rank)
    beside = make_comm(row.group).gather_objects(every, _WHERE)
    with ranks.raising_together(_WHERE):
        _check_rows(rows, ranks.ranks, row, beside)
    columns = tuple(zip(*rows, strict=True))
    topology = Topology(columns=columns, plain=row.plain, explicit_tp=explicit_tp or row.plain)
    return group_of_ranks(every, row.group), topology


def own_row(columns: Rows) -> list[int]:
    """List the ranks of this rank's row, one of each column; none where it is in no column."""
    rows = zip(*columns, strict=True)
    return next((list(row) for row in rows if dist.get_rank() in row), [])


# -- experts -----------------------------------------------------------------------------------------------------------


# Four ranks, where two have each half of the experts, and all four have all other parameters:
#
#                  experts 0   experts 1
#     replica 0    rank 0      rank 1        a row: all experts
#     replica 1    rank 2      rank 3        a column: the same ones; it sums their gradients and shards their state
#
# The tokens of an expert come from all ranks that train together, and each of these has divided its loss by its own
# tokens. So the sum of an expert's gradients is divided by the number of all these ranks, as a rule, and not by that of
# its replicas.

KEYS = ("process_group", "mesh", "grad_divisor")
"""Keys of a group of experts. They are taken out of it: their values cannot be saved, or compared between ranks."""


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks of one parameter group's experts.

    Attributes:
        ranks: those that have the same experts as this one, as the whole job numbers them.
        grad_divisor: what the sum of gradients over ``ranks`` is divided by.
        columns: the ``ranks`` of all ranks, once these have exchanged them; empty: not yet.
    """

    ranks: tuple[int, ...]
    grad_divisor: int
    columns: Rows = ()


def split_off(params: Any) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Split an optimizer's ``params`` into groups without ``KEYS``, and what each had under these, by its number."""
    if not isinstance(params, list):
        return params, {}
    plain, found = [], {}
    for number, group in enumerate(params):
        if isinstance(group, dict):
            if of_experts := {key: group[key] for key in KEYS if group.get(key) is not None}:
                found[number] = of_experts
            group = {key: value for key, value in group.items() if key not in KEYS}
        plain.append(group)
    return plain, found


def read_expert_ranks(
    given: Mapping[int, Mapping[str, Any]], all_ranks: Sequence[int], *, beside_slices: bool
) -> dict[int, ExpertRanks]:
    """Read the ranks of experts off parameter groups, by their number. A group with the ranks and divisor of all others
    is left out.

    Args:
        all_ranks: those that average the gradients of all other parameters.
        beside_slices: whether these are cut over tensor-parallel ranks. Experts are not cut, so none is left out then.

    Raises TypeError or ValueError.
    """
    found = {}
    for number, of_group in given.items():
        group = f"parameter group {number}"
        ranks, divisor = _read_options(of_group, group)
        like_all_others = ranks == tuple(all_ranks) and divisor in (None, len(ranks))
        if like_all_others and not beside_slices:
            continue
        if divisor is None and not like_all_others:
            raise ValueError(
                f"{group} is of ranks {list(ranks)}, and the optimizer averages over {list(all_ranks)}: pass "
                f"grad_divisor, by which the sum of its gradients is divided. grad_divisor={len(all_ranks)} is mostly "
                "right: tokens come to an expert from all ranks of the optimizer. "
                f"grad_divisor={len(ranks)} is the mean over those that have the same experts"
            )
        found[number] = ExpertRanks(ranks, divisor or len(ranks))
    if found and len(all_ranks) == 1:
        raise ValueError(
            f"parameter group {next(iter(found))} is of ranks {list(next(iter(found.values())).ranks)}, and the "
            f"optimizer of rank {all_ranks[0]} alone: give the optimizer all ranks that train together, and the group "
            "those of them that have the same experts"
        )
    return found


def _read_options(options: Mapping[str, Any], group: str) -> tuple[tuple[int, ...], int | None]:
    """Read the ranks that have the same experts, and the divisor, if there is one."""
    given, mesh, divisor = map(options.get, KEYS)
    if given is None and mesh is None:
        raise ValueError(
            f"{group} has grad_divisor, and neither process_group nor mesh: it is for experts, whose ranks these are"
        )
    if given is not None and mesh is not None:
        raise ValueError(f"give {group} either process_group or mesh, not both")
    option = "process_group" if mesh is None else "mesh"
    of_experts = group_along(options[option], f"{option} of {group}", "ranks with the same experts", "mesh['edp']")
    if isinstance(divisor, dist.DeviceMesh | dist.ProcessGroup):
        divisor = divisor.size()
    elif divisor is not None and (type(divisor) is not int or divisor < 1):
        raise ValueError(
            f"grad_divisor of {group} must be an int of 1 or more, or a group or mesh whose size it is; got {divisor!r}"
        )
    return tuple(dist.get_process_group_ranks(of_experts)), divisor


def read_experts_of_model(given: Mapping[K, dist.DeviceMesh | dist.ProcessGroup]) -> dict[K, ExpertRanks]:
    """Read the ranks of a model's experts, which are by their kind. Raises TypeError or ValueError."""
    found = {}
    for kind, of in given.items():
        group = group_along(of, f"experts[{kind!r}]", "ranks with the same experts", "mesh['edp']")
        ranks = tuple(dist.get_process_group_ranks(group))
        found[kind] = ExpertRanks(ranks, grad_divisor=1)  # the optimizer's groups have the divisors of gradients
    return found


def exchange_columns(given: Mapping[K, ExpertRanks], world: Comm, where: str) -> dict[K, ExpertRanks]:
    """Collective. Fill in the columns. Raises ValueError, on every rank, where they are no matrix of ranks.

    ``given``: by number of parameter group, or by kind of module.
    """
    every = world.gather_objects([of_group.ranks for of_group in given.values()], where) if given else []
    filled = {}
    for place, (key, of_group) in enumerate(given.items()):
        gives = {rank: of_rank[place] for rank, of_rank in zip(world.ranks, every, strict=True)}
        columns: Rows = tuple(sorted({*gives.values()}))
        lists = [list(column) for column in columns]
        named = f"parameter group {key}" if isinstance(key, int) else f"experts[{key!r}]"
        found = f"the ranks of {named} are {lists}, by what each rank gives"
        if sorted(rank for column in columns for rank in column) != sorted(gives):
            raise ValueError(f"{found}: each rank of the optimizer, {[*gives]}, has to be in one of these")
        if any(rank not in ranks for rank, ranks in gives.items()):
            raise ValueError(f"{found}: each rank has to give the one in which it is")
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"{found}: as many ranks have to have each expert")
        for line in (*columns, *zip(*columns, strict=True)):
            if list(line) != sorted(line):
                raise ValueError(f"{found}: they have to be the columns of a matrix of ranks in ascending order")
        filled[key] = replace(of_group, columns=columns)
    return filled
