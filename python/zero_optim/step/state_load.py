"""Plans what a saved state brings to the shards of this rank, and checks all of it before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import StateMismatchError
from ..params.flat_shard import FlatShard
from ..params.layout import SlotPiece
from ..params.storage_order import flat_of, storage_order
from ..params.tensor_slice import TensorSlice, is_distributed, local_of, placed, slice_of
from ..rules.codec import Codec
from ..rules.state_tensor import Per, StateTensor
from .saved_state import check_rows, state_tensor, tensors_of
from .shard_state import ShardState


@dataclass(frozen=True)
class Copy:
    """One copy of a load: the result of ``values``, flat, goes into this piece of this tensor."""

    shard: ShardState
    tensor: StateTensor
    piece: SlotPiece
    values: Callable[[], Tensor]


def carry_out(shard: ShardState, copies: Iterable[Copy]) -> None:
    """Make the copies of one shard."""
    with shard.opened() as state:
        for copy in copies:
            shard.set_part(copy.tensor, state, copy.piece, copy.values())


def plan_load(
    shards: Iterable[ShardState], saved: Mapping[int, Mapping[str, Any]], labels: Sequence[str]
) -> list[Copy]:
    """Plan the copies that bring in state, by parameter index. Nothing is written yet.

    Shards must cut parameters where this layout does; full tensors always fit. Raises StateMismatchError.
    """
    copies: list[Copy] = []
    for shard in shards:
        for number, piece in enumerate(shard.bucket.pieces):
            index = piece.slot.param
            if index in saved:
                copies += _plan_slot(shard, number, saved[index], labels[index])
    return copies


def _plan_slot(shard: ShardState, number: int, entry: Mapping[str, Any], label: str) -> Iterator[Copy]:
    piece, flat, own = shard.bucket.pieces[number], shard.bucket.flat, shard.rule.codecs
    forms = tensors_of(entry, shard.rule, shard.bucket.dtype)
    saved = {tensor.name: (tensor,) if codec is None else codec.parts(tensor) for tensor, codec in forms}
    check_rows([part for parts in saved.values() for part in parts], entry, flat.orders[number], label)
    target_of = partial(_target, shard, number, {})
    for tensor, codec in forms:
        parts = saved[tensor.name]
        values = [_values(entry, part, target_of(part), flat.slices[number], label) for part in parts]
        if codec is None:
            yield Copy(shard, tensor, piece, values[0])
        elif codec == own.get(tensor.name):
            yield from (Copy(shard, part, piece, of_part) for part, of_part in zip(parts, values, strict=True))
        else:
            yield Copy(shard, tensor, piece, partial(_values_of, codec, tensor, values))


def _target(
    shard: ShardState, number: int, known: dict[tuple[Per, torch.dtype], Tensor], tensor: StateTensor
) -> Tensor:
    """Show where ``tensor`` goes, without values. Tensors of a slot that differ in their name alone have one."""
    key = tensor.per, tensor.dtype
    if key not in known:
        known[key] = shard.shape(number, tensor)
    elif isinstance(target := known[key], FlatShard):
        target.label = f"{tensor.name} of {shard.bucket.label(number)}"
    return known[key]


def _values_of(codec: Codec, tensor: StateTensor, parts: Sequence[Callable[[], Tensor]]) -> Tensor:
    return codec.decode_flat(tensor, [of_part() for of_part in parts])


def _local(shard: FlatShard) -> Tensor:
    return shard.local


def _describe(tensor: Tensor) -> str:
    if is_distributed(tensor):
        return f"a slice of shape {tuple(local_of(tensor).shape)}{placed(tensor)}"
    return repr(tensor) if isinstance(tensor, FlatShard) else f"a whole tensor of shape {tuple(tensor.shape)}"


def _flat_part(saved: Tensor, target: Tensor, own: TensorSlice | None) -> Tensor:
    """Flatten this rank's part of ``saved``, which is the whole tensor, or the slice ``own`` of it that is here."""
    whole = own is not None and not is_distributed(saved) and saved.shape == own.shape
    here = own.of(saved) if own is not None and whole else local_of(saved)
    flat = flat_of(here, storage_order(target))
    return flat.narrow(0, target.start, target.local.numel()) if isinstance(target, FlatShard) else flat


def _values(
    entry: Mapping[str, Any], tensor: StateTensor, target: Tensor, own: TensorSlice | None, label: str
) -> Callable[[], Tensor]:
    """Make a function that gives the part of ``tensor`` in ``entry`` that belongs into ``target``, flat.

    ``own``: the slice that ``target`` is a part of.
    """
    saved = state_tensor(entry, tensor, target.shape, label)
    if not isinstance(saved, FlatShard) and slice_of(saved, label) in (None, own):
        return partial(_flat_part, saved, target, own)  # deferred: in another memory format it makes a copy
    if isinstance(target, FlatShard) and isinstance(saved, FlatShard) and saved.same_range(target):
        return partial(_local, saved)
    raise StateMismatchError(
        f"{tensor.name} of {label} was saved as {_describe(saved)}, this rank needs {_describe(target)}: load it with "
        "as many ranks, on the same rank, at the same stage, bucket_cap_mb and grad_reduce_dtype as it was saved; or "
        "save zero_optim.full_state_dict(opt), which loads anywhere"
    )
