"""Experts: parameters that differ between ranks under one name. A parameter group says which ranks have the same ones.

Four ranks, where two have each half of the experts, and all four have all other parameters::

                 experts 0   experts 1
    replica 0    rank 0      rank 1        a row: all experts
    replica 1    rank 2      rank 3        a column: the same ones; gradients are added up along it, and state shared

So experts lie on ranks as tensor-parallel slices do (see ``TensorRanks``), but for some parameters alone. The tokens of
an expert come from all ranks that train together, and each of these has divided its loss by its own tokens. So the sum
of an expert's gradients is divided by the number of all these ranks, as a rule, and not by that of its replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from .collectives import Comm
from .grid import Rows
from .sharding import Sharding
from .tensor_ranks import make_tensor_ranks

KEYS = ("process_group", "mesh", "grad_divisor")
"""Keys of a group of experts. They are taken out of it: their values cannot be saved, or compared between ranks."""


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks of one parameter group's experts.

    Attributes:
        ranks: those that have the same experts as this one, as the whole job numbers them.
        grad_divisor: what the sum of gradients over ``ranks`` is divided by.
        columns: the ``ranks`` of all ranks, once they have told each other; empty: not yet.
    """

    ranks: tuple[int, ...]
    grad_divisor: int
    columns: Rows = ()


def split_off(params: Any) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Split an optimizer's ``params`` into groups without ``KEYS``, and what each said under these, by its number."""
    if not isinstance(params, list):
        return params, {}
    said = {
        number: {key: group[key] for key in KEYS if group.get(key) is not None}
        for number, group in enumerate(params)
        if isinstance(group, dict)
    }
    plain = [
        {key: value for key, value in group.items() if key not in KEYS} if isinstance(group, dict) else group
        for group in params
    ]
    return plain, {number: of_group for number, of_group in said.items() if of_group}


def read_expert_ranks(
    said: Mapping[int, Mapping[str, Any]], all_ranks: Sequence[int], *, beside_slices: bool
) -> dict[int, ExpertRanks]:
    """Read what groups say of experts, by their number. A group with the ranks and divisor of all others is left out.

    Args:
        all_ranks: those that average the gradients of all other parameters.
        beside_slices: whether these are cut over tensor-parallel ranks. Experts are not cut, so none is left out then.

    Raises TypeError or ValueError.
    """
    found = {}
    for number, of_group in said.items():
        group = f"parameter group {number}"
        ranks = _ranks_of(of_group, group)
        divisor = _divisor_of(of_group.get("grad_divisor"), group)
        if ranks == tuple(all_ranks) and divisor in (None, len(ranks)):
            if beside_slices:
                found[number] = ExpertRanks(ranks, len(ranks))
            continue
        if divisor is None:
            raise ValueError(
                f"{group} is of ranks {list(ranks)}, and the optimizer averages over {list(all_ranks)}: say by "
                f"grad_divisor what the sum of its gradients is divided by. grad_divisor={len(all_ranks)} is as a rule "
                "right: tokens come to an expert from all ranks of the optimizer. "
                f"grad_divisor={len(ranks)} is the mean over those that have the same experts"
            )
        found[number] = ExpertRanks(ranks, divisor)
    if found and len(all_ranks) == 1:
        raise ValueError(
            f"parameter group {next(iter(found))} is of ranks {list(next(iter(found.values())).ranks)}, and the "
            f"optimizer of rank {all_ranks[0]} alone: give the optimizer all ranks that train together, and the group "
            "those of them that have the same experts"
        )
    return found


def _ranks_of(said: Mapping[str, Any], group: str) -> tuple[int, ...]:
    given, mesh = said.get("process_group"), said.get("mesh")
    if given is None and mesh is None:
        raise ValueError(
            f"{group} has grad_divisor, and neither process_group nor mesh: it is for experts, whose ranks these are"
        )
    if given is not None and mesh is not None:
        raise ValueError(f"give {group} either process_group or mesh, not both")
    if mesh is not None:
        if not isinstance(mesh, dist.DeviceMesh):
            raise TypeError(f"mesh of {group} is a {type(mesh).__name__}: give a DeviceMesh, as mesh['edp']")
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh of {group} has {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give the one along which ranks "
                "have the same experts, as mesh['edp']"
            )
        given = mesh.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"process_group of {group} is a {type(given).__name__}: give the process group of which this rank is, with "
            "those that have the same experts"
        )
    return tuple(dist.get_process_group_ranks(given))


def _divisor_of(given: Any, group: str) -> int | None:
    if isinstance(given, dist.DeviceMesh | dist.ProcessGroup):
        return given.size()
    if given is not None and (type(given) is not int or given < 1):
        raise ValueError(
            f"grad_divisor of {group} must be an int of 1 or more, or a group or mesh whose size it is; got {given!r}"
        )
    return given


def told_each_other(said: Mapping[int, ExpertRanks], everyone: Comm, where: str) -> dict[int, ExpertRanks]:
    """Collective. Fill in the columns. Raises ValueError, on every rank, where they are no matrix of ranks."""
    every = everyone.gather_objects([of_group.ranks for of_group in said.values()], where) if said else []
    return {
        number: replace(of_group, columns=_columns([of[place] for of in every], everyone.ranks, number))
        for place, (number, of_group) in enumerate(said.items())
    }


def make_expert_shardings(main: Sharding, said: Mapping[int, ExpertRanks]) -> dict[int, Sharding]:
    """Collective. Make the shardings of these groups, by their number. ``main``: of all other parameters."""
    made: dict[Rows, Sharding] = {}
    for columns in dict.fromkeys(of_group.columns for of_group in said.values()):
        ranks = make_tensor_ranks(main.everyone, columns, main.device)
        made[columns] = replace(main, grid=None, tensor_ranks=ranks)
    return {number: replace(made[of.columns], grad_divisor=of.grad_divisor) for number, of in said.items()}


def _columns(given: Sequence[tuple[int, ...]], all_ranks: Sequence[int], number: int) -> Rows:
    """Check the columns that are ``given``: by rank, the ranks that it says have the same experts."""
    columns: Rows = tuple(sorted({*given}))
    found = f"the ranks of parameter group {number} are {[list(column) for column in columns]}, by what each rank gives"
    if sorted(rank for column in columns for rank in column) != sorted(all_ranks):
        raise ValueError(f"{found}: each rank of the optimizer, {list(all_ranks)}, has to be in one of these")
    if any(rank not in ranks for rank, ranks in zip(all_ranks, given, strict=True)):
        raise ValueError(f"{found}: each rank has to give the one in which it is")
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"{found}: as many ranks have to have each expert")
    for line in (*columns, *zip(*columns, strict=True)):
        if list(line) != sorted(line):
            raise ValueError(f"{found}: they have to be the columns of a matrix of ranks in ascending order")
    return columns
