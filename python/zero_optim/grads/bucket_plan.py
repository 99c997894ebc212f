"""Which parameters share a bucket: at stages 0 to 2 as many as fit into it, at stage 3 those of a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..comm.sharding import Sharding
from ..params.flat_params import FlatParams
from ..params.layout import bucket_capacities, build_layout
from ..units.sharded_model import ShardedModel
from .bucket import Bucket


def buckets_by_size(
    parameters: Mapping[int, Tensor],
    labels: Sequence[str],
    sharding: Sharding,
    bucket_cap_mb: float | None,
    order: Sequence[int],
) -> list[Bucket]:
    kinds = {index: parameter.dtype for index, parameter in parameters.items()}
    numels = {index: parameter.numel() for index, parameter in parameters.items()}
    itemsizes = {kind: sharding.reduce_dtype(kind).itemsize for kind in kinds.values()}
    cap_bytes = None if bucket_cap_mb is None else bucket_cap_mb * 2**20
    capacities = bucket_capacities(numels, kinds, cap_bytes, itemsizes, sharding.shard_count)
    layouts = build_layout(numels, kinds, order, capacities, sharding.shard_count)
    flats = [FlatParams(layout, [parameters[s.param] for s in layout.slots], sharding) for layout in layouts]
    return [Bucket(layout, flat, labels, sharding) for layout, flat in zip(layouts, flats, strict=True)]


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
