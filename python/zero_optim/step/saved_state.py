"""Saved states: which tensors of which parameters they have, and what they bring to the shards of this rank.

A saved state comes from ``opt.state_dict()``, from ``full_state_dict`` or from a checkpoint. ``Engine.begin_load`` and
``Engine.end_load`` do the part of loading that is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_kernels import ROW

from ..errors import StateMismatchError
from ..params.flat_shard import FlatShard
from ..params.layout import SlotPiece
from ..params.storage_order import StorageOrder, flat_of, storage_order, strides_of
from ..params.tensor_slice import is_distributed, local_of, placed, slice_of
from ..rules.codec import Begins, Codec, Per, StateTensor, saved_codec
from ..rules.update_rule import UpdateRule, tensors_for
from .shard_state import ShardState


@dataclass(frozen=True)
class SavedState:
    """A saved state that fits the parameters here.

    Attributes:
        tensors: by parameter index, the names of the tensors that it has. All others are reset.
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
    # A saved master is fp32, however it was stored. ``Split`` says which masters change.
    return own is not None and not own.reads_parameter and own != saved


def check_rows(tensors: Iterable[StateTensor], entry: Mapping[str, Any], order: StorageOrder, label: str) -> None:
    """Raise StateMismatchError where ``entry`` has state for rows of a parameter that lay in another order than
    ``order``, which its state for elements shows."""
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


def call_load_hooks(opt: Any) -> None:
    """Call the hooks given to ``register_load_state_dict_post_hook``, as torch does."""
    for hook in opt._optimizer_load_state_dict_post_hooks.values():
        hook(opt)


# -- the plan of a load, checked before anything is written ------------------------------------------------------------


class Copy(NamedTuple):
    """One copy of a load: the result of ``values``, flat, goes into this piece of this tensor."""

    shard: ShardState
    tensor: StateTensor
    piece: SlotPiece
    values: Callable[[], Tensor]


def plan_load(
    shards: Iterable[ShardState], saved: Mapping[int, Mapping[str, Any]], labels: Sequence[str]
) -> list[Copy]:
    """Plan the copies that bring in state, by parameter index. Nothing is written yet.

    Shards must cut parameters where this layout does; full tensors always fit. Raises StateMismatchError.
    """
    copies: list[Copy] = []
    slots = ((shard, number) for shard in shards for number in range(len(shard.bucket.pieces)))
    for shard, number in slots:
        piece, own = shard.bucket.pieces[number], shard.rule.codecs
        if piece.slot.param not in saved:
            continue
        entry, label = saved[piece.slot.param], labels[piece.slot.param]
        forms = tensors_of(entry, shard.rule, shard.bucket.dtype)
        stored = [(tensor,) if codec is None else codec.parts(tensor) for tensor, codec in forms]
        check_rows([part for parts in stored for part in parts], entry, shard.bucket.flat.orders[number], label)
        for (tensor, codec), parts in zip(forms, stored, strict=True):
            values = [_values(shard, number, entry, part, label) for part in parts]
            if codec is None:
                copies.append(Copy(shard, tensor, piece, values[0]))
            elif codec == own.get(tensor.name):
                copies += [Copy(shard, part, piece, of_part) for part, of_part in zip(parts, values, strict=True)]
            else:  # stored in another form than here: decoded, and encoded again as it is written
                copies.append(Copy(shard, tensor, piece, partial(_values_of, codec, tensor, values)))
    return copies


def _values_of(codec: Codec, tensor: StateTensor, parts: Sequence[Callable[[], Tensor]]) -> Tensor:
    return codec.decode_flat(tensor, [of_part() for of_part in parts])


def _describe(tensor: Tensor) -> str:
    if is_distributed(tensor):
        return f"a slice of shape {tuple(local_of(tensor).shape)}{placed(tensor)}"
    return repr(tensor) if isinstance(tensor, FlatShard) else f"a whole tensor of shape {tuple(tensor.shape)}"


def _values(
    shard: ShardState, number: int, entry: Mapping[str, Any], tensor: StateTensor, label: str
) -> Callable[[], Tensor]:
    """Make a function that returns the part of ``tensor`` in ``entry`` that belongs into slot ``number``, flat."""
    extent, own = shard.extent(number, tensor), shard.bucket.flat.slices[number]
    saved = state_tensor(entry, tensor, extent.shape, label)

    def flat_part() -> Tensor:
        """Flatten this rank's part of ``saved``, which is the whole tensor, or the slice ``own`` of it that is here."""
        whole = own is not None and not is_distributed(saved) and saved.shape == own.shape
        flat = flat_of(own.of(saved) if own is not None and whole else local_of(saved), extent.order)
        return flat if extent.whole else flat.narrow(0, extent.start, extent.numel)

    if not isinstance(saved, FlatShard):
        if slice_of(saved, label) in (None, own):
            return flat_part  # deferred: in another memory format it makes a copy
    elif not extent.whole and saved.slice == own and saved.stride() == strides_of(extent.shape, extent.order):
        local = saved.local
        if (saved.start, local.numel()) == (extent.start, extent.numel):
            return lambda: local
    _, numel = tensor.span(0, shard.numel)
    wanted = shard.shown(number, tensor, torch.empty(numel, dtype=tensor.dtype, device="meta"))
    raise StateMismatchError(
        f"{tensor.name} of {label} was saved as {_describe(saved)}, this rank needs {_describe(wanted)}: load it with "
        "as many ranks, on the same rank, at the same stage, bucket_cap_mb and grad_reduce_dtype as it was saved; or "
        "save zero_optim.full_state_dict(opt), which loads anywhere"
    )
