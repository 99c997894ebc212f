"""Which parameters share a bucket: at stages 0 to 2 as many as fit into it, at stage 3 those of a unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.sharding import Sharding
from ..params.flat_params import FlatParams
from ..params.layout import BucketLayout, bucket_capacities, build_layout
from ..units.sharded_model import ShardedModel
from .bucket import Bucket


def buckets_by_size(
    parameters: Mapping[int, Tensor],
    labels: Sequence[str],
    sharding: Sharding,
    bucket_cap_mb: float | None,
    order: Sequence[int],
) -> list[Bucket]:
    dtypes = {index: parameter.dtype for index, parameter in parameters.items()}
    numels = {index: parameter.numel() for index, parameter in parameters.items()}
    layouts = layouts_by_size(numels, dtypes, sharding, bucket_cap_mb, order)
    flats = [FlatParams(layout, [parameters[s.param] for s in layout.slots], sharding) for layout in layouts]
    return [Bucket(layout, flat, labels, sharding) for layout, flat in zip(layouts, flats, strict=True)]


def layouts_by_size(
    numels: Mapping[int, int],
    dtypes: Mapping[int, torch.dtype],
    sharding: Sharding,
    bucket_cap_mb: float | None,
    order: Sequence[int],
) -> list[BucketLayout]:
    """Of parameters of so many elements, by index: as many in a bucket as fit. Without any tensors."""
    itemsizes = {dtype: sharding.reduce_dtype(dtype).itemsize for dtype in dtypes.values()}
    cap_bytes = None if bucket_cap_mb is None else bucket_cap_mb * 2**20
    capacities = bucket_capacities(numels, dtypes, cap_bytes, itemsizes, sharding.shard_count)
    return build_layout(numels, dtypes, order, capacities, sharding.shard_count)


def buffer_nbytes(buckets: Iterable[tuple[int, torch.dtype]], sharding: Sharding) -> int:
    """Of one communication buffer, which gradients of any bucket of so many elements go through."""
    sizes = (numel * sharding.reduce_dtype(dtype).itemsize for numel, dtype in buckets)
    return max(sizes, default=0) if sharding.reduces else 0


def buckets_of_units(
    sharded: ShardedModel,
    parameters: Mapping[int, Tensor],
    labels: Sequence[str],
    sharding: Sharding,
    order: Sequence[int],
) -> list[Bucket]:
    index_of = {id(parameters[index]): index for index in order}
    flats = sharded.flats_to_train([parameters[index] for index in order])
    layouts = [flat.layout.renumbered([index_of[id(parameter)] for parameter in flat.params]) for flat in flats]
    return [Bucket(layout, flat, labels, sharding) for layout, flat in zip(layouts, flats, strict=True)]
