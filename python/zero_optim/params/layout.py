"""Where every parameter lives: slots in buckets, buckets in shards. Integers only, no tensors.

A bucket is a flat run of slots of one kind (dtype). Every slot starts on a row of 128 elements and the bucket
is padded to ``shards * 128``, so a shard boundary always falls between rows, and no row holds two
parameters::

    bucket  | slot 0 ...... | slot 1 .. | slot 2 ............ | padding |
    rows    |r0 |r1 |r2 |r3 |r4 |r5 |r6 |...                            |
    shards  | rank 0                | rank 1                            |
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

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
    """What one shard holds of a slot: ``numel`` elements, from ``in_param`` of the parameter, at ``in_shard``."""

    slot: Slot
    in_param: int
    in_shard: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket, in ascending offset, and its split into ``shards`` equal parts."""

    slots: tuple[Slot, ...]
    shards: int

    @cached_property
    def numel(self) -> int:
        """Elements, padding included: a multiple of ``shards * ROW``, at least one row a shard."""
        end = self.slots[-1].offset + self.slots[-1].numel
        return round_up(max(end, 1), self.shards * ROW)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def renumbered(self, params: Sequence[int]) -> BucketLayout:
        """The same places for parameters with other indices, slot by slot."""
        slots = zip(self.slots, params, strict=True)
        return replace(self, slots=tuple(replace(slot, param=param) for slot, param in slots))

    def pieces(self, shard: int) -> Iterator[SlotPiece]:
        """What ``shard`` holds of every slot, empty pieces included."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        for slot in self.slots:
            start = min(max(slot.offset, low), high)
            end = max(min(slot.offset + slot.numel, high), start)
            if start == end:
                yield SlotPiece(slot, 0, 0, 0)
            else:
                yield SlotPiece(slot, start - slot.offset, start - low, end - start)

    def row_slot(self, shard: int) -> list[int]:
        """For each row of ``shard``, the index of the parameter that owns it; -1 for padding."""
        rows = [-1] * (self.shard_numel // ROW)
        for piece in self.pieces(shard):
            first = piece.in_shard // ROW
            count = -(-piece.numel // ROW)
            rows[first : first + count] = [piece.slot.param] * count
        return rows


def bucket_capacities(
    numels: Mapping[int, int],
    kinds: Mapping[int, Hashable],
    cap_bytes: float,
    itemsizes: Mapping[Any, int],
) -> dict[Hashable, int]:
    """Elements that a bucket of each kind may hold: ``cap_bytes``, never more than 1/4 of all that kind has.

    A quarter leaves at least four buckets, so that reductions overlap with backward in small models too.
    """
    totals: dict[Hashable, int] = {}
    for param, kind in kinds.items():
        totals[kind] = totals.get(kind, 0) + round_up(numels[param], ROW)
    return {kind: max(ROW, min(int(cap_bytes) // itemsizes[kind], total // 4)) for kind, total in totals.items()}


def build_layout(
    numels: Mapping[int, int],
    kinds: Mapping[int, Hashable],
    order: Sequence[int],
    capacities: Mapping[Hashable, int],
    shards: int,
) -> list[BucketLayout]:
    """Fill buckets with the parameters in ``order``; a bucket's index follows the place of its last slot in it.

    Args:
        numels: elements of each parameter, by index.
        kinds: what must not mix in a bucket (the dtype), by index.
        order: indices of the parameters to place, in the order in which their gradients become ready.
        capacities: elements a bucket of each kind may hold; a larger parameter has a bucket to itself.
        shards: parts that every bucket splits into.
    """
    filled: list[tuple[int, list[Slot]]] = []
    current: dict[Hashable, tuple[int, list[Slot]]] = {}
    for place, param in enumerate(order):
        kind, numel = kinds[param], numels[param]
        slots = current[kind][1] if kind in current else []
        offset = round_up(slots[-1].offset + slots[-1].numel, ROW) if slots else 0
        if slots and offset + numel > capacities[kind]:
            filled.append(current[kind])
            slots, offset = [], 0
        slots.append(Slot(param, offset, numel))
        current[kind] = (place, slots)
    filled.extend(current.values())
    filled.sort(key=lambda entry: entry[0])
    return [BucketLayout(tuple(slots), shards) for _, slots in filled]
