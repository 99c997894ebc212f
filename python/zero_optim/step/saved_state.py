"""``SavedState``: which tensors of which parameters a saved state has that is going to be loaded.

It comes from ``opt.state_dict()``, from ``full_state_dict`` or from a checkpoint. ``Engine.begin_load`` and
``Engine.end_load`` do the part of loading that is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_kernels import ROW

from ..errors import StateMismatchError
from ..params.flat_shard import FlatShard
from ..params.storage_order import StorageOrder, storage_order
from ..params.tensor_slice import is_distributed
from ..rules.codec import Codec, saved_codec
from ..rules.state_tensor import Begins, Per, StateTensor
from ..rules.update_rule import UpdateRule, tensors_for


@dataclass(frozen=True)
class SavedState:
    """A saved state that fits the parameters here.

    Attributes:
        tensors: by parameter index, the names of the tensors that it has. All others begin anew.
        steps: [parameters] float64 on the CPU, the updates that each has had.
        rounded: names of tensors that were saved with more bits than are kept here.
    """

    tensors: Mapping[int, Collection[str]]
    steps: Tensor
    rounded: frozenset[str] = frozenset()


def tensors_of(
    entry: Mapping[str, Any], rule: UpdateRule, dtype: torch.dtype
) -> list[tuple[StateTensor, Codec | None]]:
    """List the tensors that ``entry`` has to have for a parameter of ``dtype``, with the codecs that they are stored
    by. A tensor that begins as the parameter, or as its master, may be missing."""
    forms = [(tensor, saved_codec(tensor, entry, rule.codecs)) for tensor in tensors_for(rule, dtype)]
    return [(t, codec) for t, codec in forms if t.begins is Begins.ZERO or codec is not None or t.name in entry]


def is_rounded(name: str, rule: UpdateRule, saved: Codec | None) -> bool:
    """Whether the state ``name``, stored by ``saved``, loses something as ``rule`` stores it."""
    own = rule.codecs.get(name)
    return own is not None and not own.keeps(saved)


def check_rows(tensors: Iterable[StateTensor], entry: Mapping[str, Any], order: StorageOrder, label: str) -> None:
    """Raise StateMismatchError where ``entry`` has state for rows of a parameter that lay in another order than
    ``order``, as its state for elements tells."""
    if not any(tensor.per is Per.ROW for tensor in tensors):
        return
    elements = [entry.get(tensor.name) for tensor in tensors if tensor.per is Per.ELEMENT]
    if any(isinstance(saved, Tensor) and storage_order(saved) != order for saved in elements):
        raise StateMismatchError(
            f"the state of {label} has values for rows of {ROW} elements as they lie in memory, and it lies in another "
            "order here: bring the model to the memory format that it was saved in"
        )


def state_tensor(entry: Mapping[str, Any], tensor: StateTensor, shape: Sequence[int], label: str) -> Tensor:
    """Take ``tensor``, of ``shape``, out of ``entry``. Floats may be of any floating dtype, others are of the tensor's
    own. Raises StateMismatchError."""
    name = tensor.name
    saved = entry.get(name)
    if not isinstance(saved, Tensor):
        raise StateMismatchError(f"the state of {label} has no tensor {name!r}, but {sorted(map(str, entry))}")
    if tuple(saved.shape) != tuple(shape):
        raise StateMismatchError(
            f"{name} of {label} has shape {tuple(saved.shape)}, expected {tuple(shape)}: give the optimizer the same "
            "parameters, in the same order"
        )
    known = type(saved) in (Tensor, nn.Parameter, FlatShard) or is_distributed(saved)
    plain = known and saved.layout is torch.strided and not saved.is_meta
    same_kind = saved.is_floating_point() if tensor.dtype.is_floating_point else saved.dtype == tensor.dtype
    if not plain or not same_kind:
        kind = f"{type(saved).__name__} of {saved.dtype}, {saved.layout}, on {saved.device}"
        wanted = "floating-point tensor" if tensor.dtype.is_floating_point else f"tensor of {tensor.dtype}"
        raise StateMismatchError(f"{name} of {label} is a {kind}: it must be a dense {wanted} with values")
    return saved
