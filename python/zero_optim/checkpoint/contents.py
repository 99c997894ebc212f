"""What a rank holds of a model: named tensors, and the flat range of each that is in its memory.

Saving reads them and loading writes them, both by way of ``values``. Stages differ in the ranges alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.together import Ranks
from ..errors import CheckpointError, ParameterError
from ..params.param_shard import ParamShard, plain_parameter
from ..params.parameter_set import plain_name
from ..params.storage_order import Cut, storage_order
from ..params.tensor_slice import is_slice, local_of, slice_of
from .index import BUFFER, PARAMETER, FlatRange, Key, TensorSpec


@dataclass(frozen=True)
class Holders:
    """The ranks that have the same elements: ``count`` of them, of which this one is the ``number``-th. ``alike``: they
    surely have the same values. If not, those of the first rank count."""

    count: int = 1
    number: int = 0
    alike: bool = True


@dataclass(frozen=True)
class Holding(FlatRange):
    """The part of a tensor that this rank has in memory."""

    held_by: Holders


@dataclass(frozen=True)
class ColumnRanks:
    """The ranks with the same slices of some parameters as this one. ``stack``: of plain slices, how many there are,
    and which of them these ranks have."""

    ranks: Ranks
    stack: tuple[int, int] = (1, 0)


@dataclass(frozen=True)
class Columns:
    """The column of each parameter. ``main``: of all but experts; None: they are not cut, or how is not known here.
    ``of_experts``: of experts that are slices of one parameter, by its id."""

    main: ColumnRanks | None = None
    of_experts: Mapping[int, ColumnRanks] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> ColumnRanks | None:
        return self.of_experts.get(id(tensor), self.main)


class Names:
    """Names of a model's parameters.

    Attributes:
        parameters: each parameter once, under its first name.
        aliases: the other names of tied ones, and the first of each.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._of: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            name, plain = plain_name(name), plain_parameter(parameter)
            first = self._of.setdefault(id(plain), name)
            if first == name:
                self.parameters[name] = parameter
            else:
                self.aliases[name] = first

    def of(self, parameter: Tensor, label: str) -> str:
        """Find a parameter's name. Raises ParameterError for one that the model does not have."""
        if (name := self._of.get(id(plain_parameter(parameter)))) is None:
            raise ParameterError(
                f"{label} is in the optimizer, and not in the model: a checkpoint names tensors as the model does. "
                "Give the model that has all of them"
            )
        return name

    def equal_to(self, name: str) -> list[str]:
        """List all names of the parameter ``name``, beginning with this one."""
        return [name, *(alias for alias, first in self.aliases.items() if first == name)]


class TensorContents:
    """Tensors by kind and name: whole on every rank, but for parameters that are sharded.

    Attributes:
        specs: of all tensors, the same on every rank.
        holdings: what this rank has of them.
    """

    def __init__(self, tensors: Mapping[Key, Tensor], ranks: Ranks, columns: Columns) -> None:
        """``ranks``: all that have the tensors."""
        self.holdings = [_holding(*key, tensor, ranks, columns.of(tensor)) for key, tensor in tensors.items()]
        self._tensors = [local_of(tensor) for tensor in tensors.values()]
        self.specs = [holding.spec for holding in self.holdings]

    def check_writable(self) -> None:
        """Raise ParameterError, before the first tensor is written, for one that torch would not write."""
        for holding, tensor in zip(self.holdings, self._tensors, strict=True):
            if tensor.is_inference() and not torch.is_inference_mode_enabled():
                raise ParameterError(
                    f"the {holding.spec.label} was made in torch.inference_mode(), and torch writes it nowhere else: "
                    "make the model outside, or give it a .clone() that is made outside"
                )
            if isinstance(tensor, ParamShard):
                continue
            if tensor.numel() > 0 and torch._debug_has_internal_overlap(tensor) == 1:  # 1: surely; others may, too
                raise ParameterError(
                    f"the {holding.spec.label} is a view, such as expand gives, of which several elements are one in "
                    "memory, and torch does not write it: give the model a .clone() of it"
                )

    def values(self) -> Generator[Tensor]:
        """Give the elements [length] of each holding, in order: to be read or written before the next is asked for."""
        for flat, alike in itertools.groupby(self._tensors, lambda tensor: getattr(tensor, "flat", None)):
            with nullcontext() if flat is None else flat.memory.opened() as shard:  # once for all of them, as on a disk
                for tensor in alike:
                    yield from _values(tensor, shard)


def _values(tensor: Tensor, shard: Tensor | None) -> Generator[Tensor]:
    """See ``TensorContents.values``. ``shard``: that which a ParamShard is a part of, opened."""
    if isinstance(tensor, ParamShard):
        flat = tensor.local if shard is None else tensor.part_of(shard)
        before = flat._version
        yield flat
        if flat._version != before:
            # An optimizer with a master of the parameter has to see the edit.
            torch.autograd.graph.increment_version(tensor.plain)
    elif tensor.is_contiguous():
        yield tensor.detach().view(-1)
    else:
        flat = tensor.detach().contiguous().view(-1)
        before = flat._version
        yield flat
        if flat._version != before:  # a load wrote it
            tensor.detach().copy_(flat.view(tensor.shape))


def contents_of_model(model: nn.Module, names: Names, ranks: Ranks, columns: Columns) -> TensorContents:
    """Collect parameters, and the buffers that ``state_dict`` has."""
    tensors = {(PARAMETER, name): parameter for name, parameter in names.parameters.items()}
    for prefix, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                tensors[BUFFER, plain_name(f"{prefix}.{own}" if prefix else own)] = buffer
    return TensorContents(tensors, ranks, columns)


def _holding(kind: str, name: str, tensor: Any, ranks: Ranks, column: ColumnRanks | None) -> Holding:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{kind} of {name!r} is a {type(tensor).__name__}, and no tensor: it cannot be saved")
    spec = TensorSpec(name, kind, tuple(tensor.shape), tensor.dtype)
    if isinstance(tensor, ParamShard):
        own, flat = tensor.slice, tensor.flat
        spec = replace(spec, order=tensor.order, cut=None if own is None else own.arranged)
        spec, before = in_stack(spec, (1, 0) if flat is None else flat.stack)  # a plain slice is one of a stack
        start = before + tensor.start + (0 if own is None else own.start)
        return Holding(spec, start, tensor._local.numel(), Holders() if flat is None else Holders(*flat.holders))
    own, before = slice_of(tensor, spec.label), 0
    if own is not None and own.cut is not None and column is not None:
        spec, tensor, ranks = replace(spec, cut=own.arranged), local_of(tensor), column.ranks
    elif own is not None and (column is not None or own.ranks == 1):  # a DTensor that this rank has whole
        tensor = local_of(tensor)
    elif own is not None:
        raise ParameterError(
            f"the {spec.label} is a DTensor, and which ranks have the same slice is not known: give its optimizer, too"
        )
    elif column is not None and column.stack[0] > 1 and is_slice(tensor):
        spec, before = in_stack(replace(spec, order=storage_order(tensor)), column.stack)
        ranks = column.ranks
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not plain or tensor.is_conj() or tensor.is_neg():
        raise ParameterError(
            f"the {spec.label} is a {type(tensor).__name__} on {tensor.device}, {tensor.layout}: a checkpoint holds "
            "dense tensors with values. Give a model on meta memory by to_empty, or shard_module"
        )
    held_by = Holders(ranks.world_size, ranks.rank, alike=kind != BUFFER)  # ranks may differ in buffers
    return Holding(spec, before if own is None else own.start, tensor.numel(), held_by)


def in_stack(spec: TensorSpec, stack: tuple[int, int]) -> tuple[TensorSpec, int]:
    """Make the spec that is saved of a plain slice. Returns it, and where the slice begins in it. ``stack``: how many
    slices there are, and which of them it is. A single one is a whole tensor."""
    count, number = stack
    if count == 1:
        return spec, 0
    if spec.order is not None:  # files know no such order of a stack's elements
        raise ParameterError(
            f"the {spec.label} is a slice in channels_last, and a checkpoint holds contiguous slices: make it "
            "contiguous, or a DTensor"
        )
    return replace(spec, shape=(count, *spec.shape), cut=Cut(0, (1,) * count)), number * spec.numel


def modules_with_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that add something of their own to ``state_dict``, by name."""
    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
