"""Plans what a saved state brings to the shards of this rank, and checks all of it before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_kernels import ROW

from ..errors import StateMismatchError
from ..params.flat_shard import FlatShard
from ..params.layout import SlotPiece
from ..params.storage_order import StorageOrder, flat_of, storage_order
from ..params.tensor_slice import TensorSlice, is_distributed, local_of, placed, slice_of
from ..rules.codec import Codec, saved_codec
from ..rules.state_tensor import Begins, Per, StateTensor
from .shard_state import ShardState


@dataclass(frozen=True)
class Copy:
    """A part of a load: what ``values`` gives, flat, belongs into this piece of this tensor."""

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

    Shards must cut parameters where this layout does; full tensors always fit. A master that was not saved comes
    from the parameter. Raises StateMismatchError.
    """
    copies: list[Copy] = []
    for shard in shards:
        for number, piece in enumerate(shard.bucket.pieces):
            index = piece.slot.param
            if index in saved:
                copies += _plan_slot(shard, number, saved[index], labels[index])
    return copies


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


def _plan_slot(shard: ShardState, number: int, entry: Mapping[str, Any], label: str) -> Iterator[Copy]:
    piece, flat, own = shard.bucket.pieces[number], shard.bucket.flat, shard.rule.codecs
    forms = [(tensor, saved_codec(tensor, entry, own)) for tensor in shard.tensors]
    saved = {tensor.name: (tensor,) if codec is None else codec.parts(tensor) for tensor, codec in forms}
    check_rows([part for parts in saved.values() for part in parts], entry, flat.orders[number], label)
    for tensor, codec in forms:
        if tensor.begins is not Begins.ZERO and codec is None and tensor.name not in entry:
            yield Copy(shard, tensor, piece, partial(shard.parameter_of, piece))
            continue
        parts = saved[tensor.name]
        values = [_values(entry, part, shard.shape(number, part), flat.slices[number], label) for part in parts]
        if codec is not None and codec.reads_parameter:
            values.append(partial(shard.parameter_of, piece))
        if codec is None:
            yield Copy(shard, tensor, piece, values[0])
        elif codec == own.get(tensor.name):  # as it is: the model, which a master is a part of, may be loaded later
            yield from (Copy(shard, part, piece, of_part) for part, of_part in zip(parts, values, strict=False))
        else:
            yield Copy(shard, tensor, piece, partial(_values_of, codec, tensor, values))


def _values_of(codec: Codec, tensor: StateTensor, parts: Sequence[Callable[[], Tensor]]) -> Tensor:
    return codec.decode_flat(tensor, [of_part() for of_part in parts])


def state_tensor(entry: Mapping[str, Any], tensor: StateTensor, shape: Sequence[int], label: str) -> Tensor:
    """What ``entry`` has of ``tensor``, of that ``shape``. Floats may be of any floating dtype, others are of the
    tensor's own. Raises StateMismatchError."""
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


def _local(shard: FlatShard) -> Tensor:
    return shard.local


def _describe(tensor: Tensor) -> str:
    if is_distributed(tensor):
        return f"a slice of shape {tuple(local_of(tensor).shape)}{placed(tensor)}"
    return repr(tensor) if isinstance(tensor, FlatShard) else f"a whole tensor of shape {tuple(tensor.shape)}"


def _flat_part(saved: Tensor, target: Tensor, own: TensorSlice | None) -> Tensor:
    """``saved``: the whole tensor, or what the slice ``own``, that is here, has of it."""
    whole = own is not None and not is_distributed(saved) and saved.shape == own.shape
    here = own.of(saved) if own is not None and whole else local_of(saved)
    flat = flat_of(here, storage_order(target))
    return flat.narrow(0, target.start, target.local.numel()) if isinstance(target, FlatShard) else flat


def _values(
    entry: Mapping[str, Any], tensor: StateTensor, target: Tensor, own: TensorSlice | None, label: str
) -> Callable[[], Tensor]:
    """Gives the part of what ``entry`` has of ``tensor`` that belongs into ``target``, flat.

    ``own``: the slice of which that is a part.
    """
    saved = state_tensor(entry, tensor, target.shape, label)
    if not isinstance(saved, FlatShard) and slice_of(saved, label) in (None, own):
        return partial(_flat_part, saved, target, own)  # in another memory format it is a copy: not before it is wanted
    if isinstance(target, FlatShard) and isinstance(saved, FlatShard) and saved.same_range(target):
        return partial(_local, saved)
    raise StateMismatchError(
        f"{tensor.name} of {label} was saved as {_describe(saved)}, this rank needs {_describe(target)}: load it with "
        "as many ranks, on the same rank, at the same stage, bucket_cap_mb and grad_reduce_dtype as it was saved; or "
        "save zero_optim.full_state_dict(opt), which loads anywhere"
    )
