"""``FlatShard`` for ``torch.distributed.checkpoint``: rectangles of its tensor, each a view of the shard's memory.

DCP knows tensors as unions of hyper-rectangles. A flat range of an N-dimensional tensor is at most 2N-1 of them::

    . . . # #     the rest of a row
    # # # # #     whole rows
    # # . . .     the start of a row

For a channels_last tensor the rectangles are cut with its dimensions in the order of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..callers import DCP_SAVER, locals_of_callers
from ..errors import ShardAccessError
from .storage_order import StorageOrder, stored_dims, tensor_dims, view_of
from .tensor_slice import TensorSlice


class AnyFlatShard(Protocol):
    """``FlatShard``, as far as it is used here."""

    start: int
    label: str

    @property
    def shape(self) -> torch.Size: ...

    @property
    def order(self) -> StorageOrder: ...

    @property
    def slice(self) -> TensorSlice | None: ...

    @property
    def local(self) -> Tensor: ...


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor: from ``offsets`` on, of ``sizes``. It begins at element ``first`` of the flat range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def rectangles(shape: Sequence[int], start: int, numel: int) -> Iterator[Rectangle]:
    """Cut a flat range, ``numel`` elements from ``start`` on, into rectangles. A tensor without elements is one."""
    if 0 in shape:
        yield Rectangle((0,) * len(shape), tuple(shape), 0)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at, end = start, start + numel
    while at < end:
        # The outermost dimension of which a whole slice begins at ``at`` and fits.
        fitting = (dim for dim, stride in enumerate(strides) if at % stride == 0 and stride <= end - at)
        dim = next(fitting, None)
        if dim is None:  # of no dimensions: a scalar
            yield Rectangle((), (), 0)
            return
        offsets = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        count = min((end - at) // strides[dim], shape[dim] - offsets[dim])
        yield Rectangle(offsets, (*[1] * dim, count, *shape[dim + 1 :]), at - start)
        at += count * strides[dim]


def write_items(shard: AnyFlatShard, fqn: str) -> list[Any]:
    """List the items of ``shard`` that DCP is to write. Raises ShardAccessError for a storage that would lose some."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _check_storage(shard)
    properties = TensorProperties.create_from_tensor(shard.local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shard.shape),
        )
        for chunk in chunks(shard)
    ]


def chunks(shard: AnyFlatShard) -> list[Any]:
    """List the rectangles of ``shard``, in DCP's own class."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.sizes)) for part in _parts(shard)
    ]


def chunk_at(shard: AnyFlatShard, offsets: Sequence[int]) -> Tensor:
    """View the rectangle that begins at ``offsets``, in the shard's memory."""
    for part in _parts(shard):
        if part.offsets == tuple(offsets):
            return view_of(shard.local.narrow(0, part.first, part.numel), part.sizes, shard.order)
    raise ShardAccessError(f"this rank has no part of the {shard.label} that begins at {tuple(offsets)}")


def _parts(shard: AnyFlatShard) -> Iterator[Rectangle]:
    """The rectangles of ``shard``, in the dimensions of its tensor."""
    order, own = shard.order, shard.slice
    if own is not None and own.cut is not None and shard.shape != own.shape:
        raise ShardAccessError(
            f"the {shard.label} has values for rows of this tensor-parallel rank's slice, which mean nothing "
            "elsewhere, and torch.distributed.checkpoint would take them for a part of one tensor: use "
            "zero_optim.checkpoint"
        )
    shape = shard.shape if own is None else own.local_shape
    for part in rectangles(stored_dims(shape, order), shard.start, shard.local.numel()):
        offsets = tensor_dims(part.offsets, order)
        if own is not None and own.cut is not None:
            offsets = tuple(at + own.offset * (dim == own.cut.dim) for dim, at in enumerate(offsets))
        yield replace(part, offsets=offsets, sizes=tensor_dims(part.sizes, order))


def _check_storage(shard: AnyFlatShard) -> None:
    """Refuse Hugging Face's storage. DCP does not tell which storage it writes to, but a caller's local does."""
    for writer in map(type, locals_of_callers("storage_writer", DCP_SAVER)):
        if any(kind.__name__ == "HuggingFaceStorageWriter" for kind in writer.__mro__):
            raise ShardAccessError(
                f"the {shard.label} is sharded, and {writer.__name__} keeps one piece of a tensor for each name and "
                "file: the others would be lost. Use DCP's file system storage, or zero_optim.checkpoint.save; of what "
                "that has written, `zero-optim export` makes Hugging Face's files"
            )
