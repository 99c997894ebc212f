"""Advice in errors of refused operations on a shard: by the kind of tensor, and by the kind of operation."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class ShardKind(enum.Enum):
    """The kind of tensor that a shard is of."""

    GRADIENT = enum.auto()
    PARAMETER = enum.auto()
    STATE = enum.auto()


class Use(enum.Enum):
    """The kind of operation that was tried."""

    NORM = enum.auto()  # take its norm, as clipping does
    READ = enum.auto()  # read values, to calculate with them
    EDIT = enum.auto()  # write in place
    VIEW = enum.auto()  # take a part of it, or another shape
    COPY = enum.auto()  # copy its memory, as saving does


_LOCAL = "`.local` is this rank's part, a flat tensor"
_NORM = "The norm over all ranks is what opt.clip_grad_norm_(max_norm) returns"
_GATHER = "enter zero_optim.gather_parameters(model) on every rank"
_WHOLE_STATE = f"zero_optim.full_state_dict(opt) gives whole tensors; {_LOCAL}"
_READ_PARAMETER = (
    "Calling a module brings in the others, and so does a method that was given to zero_optim.register_forward_method; "
    f"to read it here, {_GATHER}"
)

REMEDIES: Mapping[ShardKind, Mapping[Use, str]] = {
    ShardKind.GRADIENT: {
        Use.NORM: f"{_NORM}, and step then clips",
        Use.READ: f"{_LOCAL}. {_NORM}. With stage=0 gradients are whole",
        Use.EDIT: "To clip, call opt.clip_grad_norm_(max_norm); for loss scaling use zero_optim.GradScaler",
        Use.VIEW: _LOCAL,
        Use.COPY: f"To keep or save it, copy this rank's part: {_LOCAL}. No checkpoint has gradients",
    },
    ShardKind.PARAMETER: {
        Use.NORM: _READ_PARAMETER,
        Use.READ: _READ_PARAMETER,
        Use.EDIT: "To write it, enter zero_optim.gather_parameters(model, writeback=True) on every rank",
        Use.VIEW: _READ_PARAMETER,
        Use.COPY: "To save it, call zero_optim.checkpoint.save, or zero_optim.full_model_state_dict(model) for whole "
        f"weights, on every rank; to copy it, {_GATHER}",
    },
    ShardKind.STATE: {
        Use.NORM: _WHOLE_STATE,
        Use.READ: _WHOLE_STATE,
        Use.EDIT: "To change it, load what zero_optim.full_state_dict(opt) gave, with your changes, by "
        "zero_optim.load_full_state_dict(opt, state)",
        Use.VIEW: _WHOLE_STATE,
        Use.COPY: "To save it, call zero_optim.checkpoint.save, or zero_optim.full_state_dict(opt) for whole tensors, "
        "on every rank",
    },
}

_USES = {
    "norm": Use.NORM,
    "linalg_norm": Use.NORM,
    "linalg_vector_norm": Use.NORM,
    "_foreach_norm": Use.NORM,
    "index": Use.VIEW,
    "clone": Use.COPY,
    "is_pinned": Use.COPY,
    "pin_memory": Use.COPY,
    "_pin_memory": Use.COPY,
}
"""The use of operators whose signature does not tell it."""


def kind_of(label: str) -> ShardKind:
    """Read the kind off a shard's label, such as "gradient of 'fc.weight'"."""
    if label.startswith("gradient of "):
        return ShardKind.GRADIENT
    return ShardKind.PARAMETER if label.startswith("parameter ") else ShardKind.STATE


def use_of(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], shard: Tensor) -> Use:
    """Classify what ``operator`` would do with ``shard``, which is among its arguments."""
    name = operator._schema.name.rpartition("::")[2]
    if name in _USES:
        return _USES[name]
    if _writes(operator, args, kwargs, shard):
        return Use.EDIT
    return Use.VIEW if operator.is_view else Use.READ


def _writes(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], shard: Tensor) -> bool:
    arguments = operator._schema.arguments
    given = {**{of.name: value for of, value in zip(arguments, args, strict=False)}, **kwargs}
    written = [given.get(of.name) for of in arguments if of.alias_info is not None and of.alias_info.is_write]
    return any(tensor is shard for tensor in pytree.tree_leaves(written))
