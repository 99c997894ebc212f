"""The place of every parameter: slots in buckets, buckets in shards. Integers only, no tensors.

A bucket is a flat run of slots of one kind (dtype). Every slot starts on a row of 128 elements and the bucket
is padded to ``shards * 128``, so a shard boundary always falls between rows, and no row holds two
parameters::

    bucket  | slot 0 ...... | slot 1 .. | slot 2 ............ | padding |
    rows    |r0 |r1 |r2 |r3 |r4 |r5 |r6 |...                            |
    shards  | rank 0                | rank 1                            |

Where a shard may end is a policy of its own, ``CutAtRows`` today: an update that goes element by element does not mind.
One that needs whole matrices would place them so that none is cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from zero_kernels import ROW


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket. ``offset`` and ``numel`` in elements."""

    param: int
    offset: int
    numel: int


@dataclass(frozen=True)
class SlotPiece:
    """A shard's part of a slot: ``numel`` elements, from ``in_param`` of the parameter, at ``in_shard``."""

    slot: Slot
    in_param: int
    in_shard: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket, in ascending offset, and its split into ``shards`` equal parts.

    ``numel``: elements, padding included: a multiple of ``shards * ROW``, at least one row a shard.
    """

    slots: tuple[Slot, ...]
    shards: int
    numel: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def renumbered(self, params: Sequence[int]) -> BucketLayout:
        """The same places for parameters with other indices, slot by slot."""
        slots = zip(self.slots, params, strict=True)
        return replace(self, slots=tuple(replace(slot, param=param) for slot, param in slots))

    def holding(self, numels: Mapping[int, int]) -> BucketLayout:
        """The same places for parameters that have less here than the room they were given: ``numels`` of each."""
        return replace(self, slots=tuple(replace(slot, numel=numels[slot.param]) for slot in self.slots))

    def pieces(self, shard: int) -> Iterator[SlotPiece]:
        """Cut out what ``shard`` holds of every slot, empty pieces included."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        for slot in self.slots:
            start = min(max(slot.offset, low), high)
            end = max(min(slot.offset + slot.numel, high), start)
            if start == end:
                yield SlotPiece(slot, 0, 0, 0)
            else:
                yield SlotPiece(slot, start - slot.offset, start - low, end - start)

    def row_slot(self, shard: int) -> list[int]:
        """List, for each row of ``shard``, the index of the parameter that owns it; -1 for padding."""
        rows = [-1] * (self.shard_numel // ROW)
        for piece in self.pieces(shard):
            first = piece.in_shard // ROW
            count = -(-piece.numel // ROW)
            rows[first : first + count] = [piece.slot.param] * count
        return rows


class LayoutPolicy(Protocol):
    """Decides where in a bucket its parameters lie, and so where shards cut them."""

    def place(self, numels: Sequence[int], shards: int) -> tuple[list[int], int]:
        """The offset of each parameter, in order, each on a row; and the elements of the bucket: ``shards`` equal parts
        of whole rows, at least one."""


class CutAtRows:
    """Parameters lie one after another, and a shard may end at any row of one. No padding but for that of rows."""

    def place(self, numels: Sequence[int], shards: int) -> tuple[list[int], int]:
        offsets, end = [], 0
        for numel in numels:
            offsets.append(round_up(end, ROW))
            end = offsets[-1] + numel
        return offsets, round_up(max(end, 1), shards * ROW)


CAP_BYTES = 25 * 2**20
ROWS_A_SHARD = 128
"""A bucket is padded by less than a row a shard, and by half of one on average. Two buckets that follow each other hold
more than one may, so a bucket holds 64 rows a shard on average, or more. Half a row is less than 1 % of that."""


def bucket_capacities(
    numels: Mapping[int, int],
    kinds: Mapping[int, Hashable],
    cap_bytes: float | None,
    itemsizes: Mapping[Any, int],
    shards: int,
) -> dict[Hashable, int]:
    """Elements that a bucket of each kind may hold: ``cap_bytes``, never more than 1/4 of all that kind has.

    A quarter leaves at least four buckets, so that reductions overlap with backward in small models too. It comes first
    where it is less than the default wants: then there is more padding.

    Args:
        cap_bytes: None: ``CAP_BYTES``, or ``ROWS_A_SHARD`` rows a shard where that is more, so that padding stays small
            however many ranks there are.
    """
    totals: dict[Hashable, int] = {}
    for param, kind in kinds.items():
        totals[kind] = totals.get(kind, 0) + round_up(numels[param], ROW)
    least = ROWS_A_SHARD * ROW * shards if cap_bytes is None else 0
    wanted = {kind: max(least, int(cap_bytes or CAP_BYTES) // itemsizes[kind]) for kind in totals}
    return {kind: max(ROW, min(wanted[kind], total // 4)) for kind, total in totals.items()}


def build_layout(
    numels: Mapping[int, int],
    kinds: Mapping[int, Hashable],
    order: Sequence[int],
    capacities: Mapping[Hashable, int],
    shards: int,
    policy: LayoutPolicy | None = None,
) -> list[BucketLayout]:
    """Fill buckets with the parameters in ``order``; a bucket's index follows the place of its last slot in it.

    Args:
        numels: elements of each parameter, by index.
        kinds: what must not mix in a bucket (the dtype), by index.
        order: indices of the parameters to place, in the order in which their gradients become ready.
        capacities: elements a bucket of each kind may hold; a larger parameter has a bucket to itself.
        shards: parts that every bucket splits into.
        policy: where in a bucket its parameters lie; None: ``CutAtRows``.
    """
    filled: list[tuple[int, list[int]]] = []  # each with the place of its last parameter in the order
    current: dict[Hashable, tuple[int, list[int]]] = {}
    taken: dict[Hashable, int] = {}  # elements of the current bucket of each kind, in whole rows
    for place, param in enumerate(order):
        kind = kinds[param]
        if kind in current and taken[kind] + numels[param] > capacities[kind]:
            filled.append(current.pop(kind))
        _, params = current.setdefault(kind, (place, []))
        taken[kind] = round_up(numels[param], ROW) + (taken[kind] if params else 0)
        params.append(param)
        current[kind] = (place, params)
    filled.extend(current.values())
    filled.sort(key=lambda entry: entry[0])
    return [_layout(params, numels, shards, policy or CutAtRows()) for _, params in filled]


def one_bucket(numels: Sequence[int], shards: int) -> BucketLayout:
    """All of these parameters in one bucket, as a unit has them."""
    indexed = dict(enumerate(numels))
    (layout,) = build_layout(indexed, dict.fromkeys(indexed, 0), list(indexed), {0: 2**63}, shards)
    return layout


def _layout(params: Sequence[int], numels: Mapping[int, int], shards: int, policy: LayoutPolicy) -> BucketLayout:
    sizes = [numels[param] for param in params]
    offsets, numel = policy.place(sizes, shards)
    return BucketLayout(tuple(map(Slot, params, offsets, sizes)), shards, numel)
