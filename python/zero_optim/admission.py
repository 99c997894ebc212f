"""Admission of parameters to an optimizer: checks on this rank alone, then an agreement of all ranks."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import validate
from .comm.collectives import Comm
from .comm.together import check_same
from .comm.topology import ExpertRanks, RowRanks, Topology, exchange_columns, read_expert_ranks
from .errors import RankMismatchError
from .params.layout import ROW
from .params.parameter_set import ParameterSet, Shardings
from .params.storage_order import described, storage_order
from .params.tensor_slice import is_cut, local_of, marked, partition, placed
from .rules.group_rules import GroupRules
from .rules.update_rule import stored_names
from .units.sharded_model import sharded_model_of

Experts = dict[int, ExpertRanks]  # by the number of their parameter group


@dataclass(frozen=True)
class Admission:
    """The optimizer that parameters are to join, and the call that adds them."""

    world: Comm  # all ranks that train together
    topology: Topology  # their places
    stage: int  # what is sharded
    pipeline_stages: int  # 1: the model is in one piece
    rules: GroupRules  # of all groups, the new ones included
    where: str  # the call, for messages
    state_offload: str | None  # the optimizer's argument
    first_group: int = 0  # the number of the first parameter group that is new

    def check(
        self, parameters: ParameterSet, expert_groups: Mapping[int, Mapping[str, Any]], row: RowRanks | None = None
    ) -> Experts:
        """Check the parameters and groups that this rank was given.

        Args:
            expert_groups: the entries of new groups about experts, by the group's number.
            row: the tensor-parallel ranks that the optimizer was given; None: none.

        Raises ParameterError, ValueError or TypeError.
        """
        indices = [index for index, number in enumerate(parameters.group_of) if number >= self.first_group]
        new = slice(self.first_group, None)
        validate.check_groups(self.rules.by_group[new], parameters.groups[new], self.first_group)
        for number, group in enumerate(parameters.groups[new], self.first_group):
            validate.warn_of_misspelt(self.rules.by_group[number], number, group)
        averaging = self.topology.averaging(self.world)
        known = _with_ranks_of_model(expert_groups, parameters)
        experts = read_expert_ranks(known, averaging, beside_slices=self.topology.columns is not None)
        validate.check_sharded(parameters, indices, experts, self.stage, self.world, self.topology, row)
        validate.check_rules_take(self.rules, parameters, indices, self.stage, self.state_offload)
        validate.check_parameters(parameters, indices)
        if self.world.world_size == 1:
            validate.check_private(parameters.all, parameters.labels)
        validate.check_backend(self.world, parameters.all[0].device)
        ranks, stages = self.world.world_size, self.pipeline_stages
        validate.check_other_marks(parameters, indices, experts, ranks, stages, self.rules)
        validate.check_any_marked(parameters.all, parameters.labels, self.topology)
        dense = [index for index in indices if parameters.group_of[index] not in experts]
        given, labels = [parameters.all[index] for index in dense], [parameters.labels[index] for index in dense]
        validate.check_marks(given, labels, self.topology)
        if not experts:  # else ``agree`` checks them, when the columns of all ranks are known
            validate.check_slices(given, labels, self.topology, {})
        return experts

    def agree(self, parameters: ParameterSet, experts: Experts, options: Mapping[str, Any]) -> Experts:
        """Collective. Compare the new parameters, the topology, and ``options``, by name, with those of other ranks.

        Returns the experts with the columns of all ranks. Raises RankMismatchError, ValueError or
        ParameterError, on every rank.
        """
        first, numbers = self.first_group, parameters.group_of
        new = [index for index, number in enumerate(numbers) if number >= first]
        description = [f"dtypes={sorted({str(parameters.all[index].dtype) for index in new})}"]
        options = {"device": parameters.all[0].device.type, **options, **self.topology.described()}
        description += [f"{name}={value}" for name, value in options.items()]
        for number, rule in enumerate(self.rules.by_group[first:], first):
            of_rule = {"rule": rule.name, **rule.fixed, **rule.described, "state": stored_names(rule)}
            description += [f"{name} of group {number}={value}" for name, value in of_rule.items()]
        if experts:  # their ranks differ, but not how many there are
            counts = {number: (len(of_group.ranks), of_group.grad_divisor) for number, of_group in experts.items()}
            description.append(f"experts: (ranks, grad_divisor) by group={counts}")
        for number, group in enumerate(parameters.groups[first:], first):
            values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for key, value in [*values.items()]:
                if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                    del values[key]  # to compare it would be a host sync
            description.append(f"group {number} with {values}")
        for index in new:
            parameter, label = parameters.all[index], validate.without_shape(parameters.labels[index])
            marks = marked(parameter)  # a plain slice has one
            kind = f"{described(parameter)}{placed(parameter)}{marks}{partition(parameter) if marks else ''}"
            kind += f", grad_dtype={parameter.grad_dtype}" if parameter.grad_dtype != parameter.dtype else ""
            place = f" of group {numbers[index]}" if parameters.names[index] else ""
            description.append(f"{label}: {kind}{place}{'' if parameter.requires_grad else ', frozen'}")
        remedy = "give the optimizer the same parameters, in the same order, with"
        check_same(self.world, description, "the constructor", remedy)
        if not experts:
            return experts
        experts = exchange_columns(experts, self.world, self.where)
        with self.world.raising_together(self.where):
            given, labels = [parameters.all[index] for index in new], [parameters.labels[index] for index in new]
            by_place = {place: experts[numbers[index]] for place, index in enumerate(new) if numbers[index] in experts}
            validate.check_slices(given, labels, self.topology, by_place)
        return experts


def _with_ranks_of_model(
    expert_groups: Mapping[int, Mapping[str, Any]], parameters: ParameterSet
) -> dict[int, Mapping[str, Any]]:
    """Give groups that have no ranks those which ``shard_module`` was given for their first parameter."""
    known = {key: of for model in sharded_model_of(parameters.all) for key, of in model.shardings().items()}
    filled = dict(expert_groups)
    for number, of_group in expert_groups.items() if known else ():
        first = next((p for p, of in zip(parameters.all, parameters.group_of, strict=False) if of == number), None)
        sharding = known.get(id(first))
        if of_group.keys() == {"grad_divisor"} and sharding is not None and sharding.of_experts:
            filled[number] = {**of_group, "process_group": sharding.data_parallel.group}
    return filled


def check_order(parameters: ParameterSet, shardings: Shardings, indices: Sequence[int], where: str) -> None:
    """Collective. Raise RankMismatchError, on every rank, where unnamed parameters come in another order on a rank.

    Names would show it. Values show it where the ranks have begun with the same ones, as from one seed: then each rank
    has the same set of values. The broadcast of rank 0's values would overwrite other parameters with them.
    """
    kinds: dict[Comm, list[int]] = {}
    for index in indices if shardings.main.agrees else ():
        if parameters.names[index] is None:
            kinds.setdefault(shardings.of(index).alike(cut=is_cut(parameters.all[index])), []).append(index)
    if not kinds:
        return
    with shardings.main.world.raising_together(where):
        errors: list[str] = []
        for comm, own in kinds.items():
            digests = _digests(parameters, own)
            whole = [hashlib.sha256(b"".join(of)).digest() for of in (digests, sorted(digests))]
            reports = comm.gather_objects(whole, where)
            if all(in_order == reports[0][0] or values != reports[0][1] for in_order, values in reports):
                continue
            # Two ranks have the same values in another order: find the ranks, and the first place.
            every = comm.gather_objects(digests, where)
            odd = next(rank for rank, of in enumerate(every) if of != every[0] and sorted(of) == sorted(every[0]))
            place = next(place for place, of in enumerate(zip(every[0], every[odd], strict=True)) if of[0] != of[1])
            errors.append(
                f"{parameters.labels[own[place]]} has the values of another parameter on rank {comm.ranks[odd]} than "
                f"on rank {comm.ranks[0]}: every rank must give the optimizer the same parameters, in the same order. "
                "model.named_parameters() gives them names, which are compared"
            )
        if errors:  # raised only now: other ranks take part in the gathers of the other kinds
            raise RankMismatchError(errors[0])


def _digests(parameters: ParameterSet, indices: Sequence[int]) -> list[bytes]:
    """Hash the shape of each parameter and its first elements, as they lie in memory."""
    found: dict[int, bytes] = {}
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for index in indices:
        local = local_of(parameters.all[index]).detach()
        count = min(local.numel(), ROW)
        dense = local.is_contiguous() or storage_order(local) is not None
        head = local.as_strided((count,), (1,)) if dense and count else local.reshape(-1)[:count]
        by_dtype.setdefault(local.dtype, {})[index] = head
    for heads in by_dtype.values():
        flat = torch.cat([*heads.values()]).cpu()
        data, start = ctypes.string_at(flat.data_ptr(), flat.nbytes), 0
        for index, head in heads.items():
            shape = str(tuple(parameters.all[index].shape)).encode()
            found[index] = hashlib.blake2b(shape + data[start : start + head.nbytes], digest_size=8).digest()
            start += head.nbytes
    return [found[index] for index in indices]
