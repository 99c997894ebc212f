"""The place of every parameter: slots in buckets, buckets in shards. Integers only, no tensors.

A bucket is a flat run of slots of one kind (dtype). Every slot starts on a row of 128 elements and the bucket
is padded to ``shards * 128``, so a shard boundary always falls between rows, and no row holds two
parameters::

    bucket  | slot 0 ...... | slot 1 .. | slot 2 ............ | padding |
    rows    |r0 |r1 |r2 |r3 |r4 |r5 |r6 |...                            |
    shards  | rank 0                | rank 1                            |

A policy says where a shard may end: at any row by default; by ``WholeParameters`` it cuts no parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from zero_kernels import ROW


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# Named tuples, not frozen dataclasses: they are made in a third of the time, several for each parameter.
class Slot(NamedTuple):
    """A parameter's place in a bucket. ``offset`` and ``numel`` in elements."""

    param: int
    offset: int
    numel: int


class SlotPiece(NamedTuple):
    """A shard's part of a slot: ``numel`` elements, from ``in_param`` of the parameter, at ``in_shard``."""

    slot: Slot
    in_param: int = 0
    in_shard: int = 0
    numel: int = 0


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
        """Give the same places to parameters with other indices, slot by slot."""
        slots = zip(self.slots, params, strict=True)
        return replace(self, slots=tuple(slot._replace(param=param) for slot, param in slots))

    def holding(self, numels: Mapping[int, int]) -> BucketLayout:
        """Give the same places to parameters with fewer elements here than they were given room for: ``numels``."""
        return replace(self, slots=tuple(slot._replace(numel=numels[slot.param]) for slot in self.slots))

    def shard_of(self, slot: Slot) -> int:
        """The shard in which ``slot`` begins."""
        return min(slot.offset // self.shard_numel, self.shards - 1)  # an empty slot may lie at the very end

    def reordered(self, ranks: Sequence[int]) -> BucketLayout:
        """Put the shards into another order: ``ranks`` has the new number of each. No shard may cut a slot."""
        moved = {slot: (ranks[self.shard_of(slot)] - self.shard_of(slot)) * self.shard_numel for slot in self.slots}
        return replace(self, slots=_in_order(slot._replace(offset=slot.offset + by) for slot, by in moved.items()))

    def pieces(self, shard: int) -> Iterator[SlotPiece]:
        """Cut out the piece that ``shard`` holds of every slot, empty pieces included."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        return (_piece(slot, low, high) for slot in self.slots)

    def parts(self, slot: Slot) -> Iterator[tuple[int, SlotPiece]]:
        """Cut ``slot`` into the pieces that shards hold, each with the number of its shard."""
        length = self.shard_numel
        first, end = slot.offset // length, -(-(slot.offset + slot.numel) // length)
        shards = range(first, end if slot.numel else first)
        return ((shard, _piece(slot, shard * length, (shard + 1) * length)) for shard in shards)

    def row_slot(self, shard: int) -> list[int]:
        """List, for each row of ``shard``, the index of the parameter that owns it; -1 for padding."""
        rows = [-1] * (self.shard_numel // ROW)
        for piece in self.pieces(shard):
            first, count = piece.in_shard // ROW, -(-piece.numel // ROW)
            rows[first : first + count] = [piece.slot.param] * count
        return rows


def _piece(slot: Slot, low: int, high: int) -> SlotPiece:
    """Cut out what a shard from ``low`` to ``high`` holds of ``slot``."""
    start, end = max(slot.offset, low), min(slot.offset + slot.numel, high)
    return SlotPiece(slot, start - slot.offset, start - low, end - start) if start < end else SlotPiece(slot)


class LayoutPolicy:
    """Decides which parameters share a bucket, where they lie in it, and so where shards cut them.

    By default one after another, and a shard may end at any row. Only rows, and the bucket's end, are padded.

    Attributes:
        cuts: whether a shard may end within a parameter.
    """

    cuts = True

    def split(self, params: Sequence[int], numels: Mapping[int, int], capacity: int, shards: int) -> list[list[int]]:
        """Cut ``params``, in their order, into buckets of about ``capacity`` elements. By default a bucket is closed
        where the next parameter does not fit and 1/4 is full, so it holds 5/4 at most. A larger parameter has a bucket
        to itself; where less than 1/4 is full before it, as of norm weights, that bucket goes on behind it."""
        least = capacity // 4
        alone: list[list[int]] = []
        shared: list[list[int]] = [[]]
        taken = [0]  # by each of ``shared``, in whole rows
        for param in params:
            if taken[-1] >= least and taken[-1] + numels[param] > capacity:
                shared.append([])
                taken.append(0)
            if numels[param] > capacity:
                alone.append([param])
            else:
                shared[-1].append(param)
                taken[-1] += round_up(numels[param], ROW)
        if taken[-1] < least and sum(taken[-2:]) <= capacity + least:
            shared[-2:] = [sum(shared[-2:], [])]
        return [*alone, *filter(None, shared)]

    def place(self, params: Sequence[int], numels: Mapping[int, int], shards: int) -> tuple[list[int], int]:
        """Place ``params`` in a bucket. Returns the offset of each, in order and on a row, and the bucket's elements:
        ``shards`` equal parts of whole rows, at least one row each."""
        offsets, end = [], 0
        for param in params:
            offsets.append(round_up(end, ROW))
            end = offsets[-1] + numels[param]
        return offsets, round_up(max(end, 1), shards * ROW)


CUT_AT_ROWS = LayoutPolicy()
# The most padding of a bucket of whole parameters, as a fraction of what they take. See ``WholeParameters``.
MOST_PADDING = 0.05


class WholeParameters(LayoutPolicy):
    """Cuts no parameter. The largest come first, each goes to the shard that has least, and all shards are as long as
    the fullest. So a bucket grows until it has parameters for all shards: its padding is ``MOST_PADDING`` of what they
    take at most, but for the last bucket. Which shard a parameter is in does not depend on the order of ``params``."""

    cuts = False

    def split(self, params: Sequence[int], numels: Mapping[int, int], capacity: int, shards: int) -> list[list[int]]:
        if shards == 1:  # then nothing is cut
            return super().split(params, numels, capacity, shards)
        buckets: list[list[int]] = [[]]
        taken = look_at = 0
        for param in params:
            bucket = buckets[-1]
            bucket.append(param)
            taken += round_up(numels[param], ROW)
            if taken < capacity or len(bucket) < look_at:
                continue
            if self._numel(bucket, numels, shards) <= (1 + MOST_PADDING) * taken:
                buckets.append([])
                taken = look_at = 0
            else:  # placing all of them takes time: the more there are, the less often it is tried
                look_at = len(bucket) + 1 + len(bucket) // 32
        last = buckets.pop()
        if last and buckets:
            apart = self._numel(buckets[-1], numels, shards) + self._numel(last, numels, shards)
            if self._numel(buckets[-1] + last, numels, shards) <= apart:
                last = buckets.pop() + last
        return [*buckets, last] if last else buckets

    def _numel(self, params: Sequence[int], numels: Mapping[int, int], shards: int) -> int:
        return self.place(params, numels, shards)[1]

    def place(self, params: Sequence[int], numels: Mapping[int, int], shards: int) -> tuple[list[int], int]:
        if shards == 1:  # then nothing is cut
            return super().place(params, numels, shards)
        loads = [0] * shards
        home: dict[int, tuple[int, int]] = {}  # of each, its shard, and where it begins there
        # Ties are broken by number: the shard of a parameter must not depend on the order of ``params``.
        for param in sorted(params, key=lambda param: (-numels[param], param)):
            shard = loads.index(min(loads))
            home[param] = shard, loads[shard]
            loads[shard] += round_up(numels[param], ROW)
        longest = max(*loads, ROW)
        return [shard * longest + start for shard, start in map(home.__getitem__, params)], shards * longest


# To start a collective of NCCL takes as long as to send some MiB; of gloo, less: small buckets leave earlier.
CAP_BYTES, CAP_BYTES_ON_CPU = 100 * 2**20, 25 * 2**20
# Rows that a bucket may hold for each shard, at least. Two neighbouring buckets together hold more than one may, so a
# bucket has 64 rows a shard or more on average. Its padding is half a row a shard on average: less than 1 % of that.
ROWS_A_SHARD = 128


def bucket_capacities(
    numels: Mapping[int, int],
    kinds: Mapping[int, Hashable],
    cap_bytes: float | None,
    itemsizes: Mapping[Any, int],
    shards: int,
    *,
    on_cpu: bool = False,
) -> dict[Hashable, int]:
    """Find how many elements a bucket of each kind may hold: ``cap_bytes``, never more than 1/4 of all of that kind.

    A quarter leaves at least four buckets, so that reductions overlap with backward in small models, too. This limit
    holds also where the default wants more: then there is more padding.

    Args:
        cap_bytes: None: ``CAP_BYTES``, or where parameters are ``on_cpu`` ``CAP_BYTES_ON_CPU``; or ``ROWS_A_SHARD``
            rows a shard where that is more, so that padding stays small however many ranks there are.
    """
    totals: dict[Hashable, int] = {}
    for param, kind in kinds.items():
        totals[kind] = totals.get(kind, 0) + round_up(numels[param], ROW)
    least = ROWS_A_SHARD * ROW * shards if cap_bytes is None else 0
    cap = int(cap_bytes or (CAP_BYTES_ON_CPU if on_cpu else CAP_BYTES))
    wanted = {kind: max(least, cap // itemsizes[kind]) for kind in totals}
    return {kind: max(ROW, min(wanted[kind], total // 4)) for kind, total in totals.items()}


def build_layout(
    numels: Mapping[int, int],
    kinds: Mapping[int, Hashable],
    order: Sequence[int],
    capacities: Mapping[Hashable, int],
    shards: int,
    policies: Mapping[Hashable, LayoutPolicy] = MappingProxyType({}),
    costs: Mapping[int, int] = MappingProxyType({}),
) -> list[BucketLayout]:
    """Fill buckets with the parameters in ``order``; a bucket's index follows the place of its last slot in it.

    Args:
        numels: elements of each parameter, by index.
        kinds: what must not mix in a bucket (the dtype, the rule), by index.
        order: indices of the parameters to place, in the order in which their gradients become ready.
        capacities: elements a bucket of each kind may hold, or about as many, as its policy says.
        shards: parts that every bucket splits into.
        policies: by kind; kinds without one have ``CUT_AT_ROWS``.
        costs: of the update of a parameter that is not cut, by index, in one unit for all; else its elements.
    """
    place = {param: number for number, param in enumerate(order)}
    buckets: list[list[int]] = []
    for kind in dict.fromkeys(kinds[param] for param in order):
        of_kind = [param for param in order if kinds[param] == kind]
        buckets += policies.get(kind, CUT_AT_ROWS).split(of_kind, numels, capacities[kind], shards)
    buckets.sort(key=lambda params: place[params[-1]])
    to_do = [0] * shards  # the cost of each rank's shards so far, in buckets whose parameters are whole
    layouts = []
    for params in buckets:
        policy = policies.get(kinds[params[0]], CUT_AT_ROWS)
        layout = _layout(params, numels, shards, policy)
        layouts.append(layout if policy.cuts else _assign(layout, costs, to_do))
    return layouts


def _assign(layout: BucketLayout, costs: Mapping[int, int], to_do: list[int]) -> BucketLayout:
    """Assign the most expensive shard to the rank with the least ``to_do``, and so on; add the costs to ``to_do``."""
    takes = [0] * layout.shards
    for slot in layout.slots:
        takes[layout.shard_of(slot)] += costs.get(slot.param, slot.numel)
    every = range(layout.shards)
    shards, ranks = sorted(every, key=lambda shard: -takes[shard]), sorted(every, key=to_do.__getitem__)
    rank_of = dict(zip(shards, ranks, strict=True))
    for shard, rank in rank_of.items():
        to_do[rank] += takes[shard]
    return layout.reordered([rank_of[shard] for shard in every])


def one_bucket(numels: Sequence[int], shards: int, parts: int = 1) -> BucketLayout:
    """Lay all parameters out in one bucket, as a unit has them. ``parts``: of whole rows, into which shards split."""
    return replace(_layout(range(len(numels)), dict(enumerate(numels)), shards * parts, CUT_AT_ROWS), shards=shards)


def _layout(params: Sequence[int], numels: Mapping[int, int], shards: int, policy: LayoutPolicy) -> BucketLayout:
    offsets, numel = policy.place(params, numels, shards)
    slots = (Slot(param, offset, numels[param]) for param, offset in zip(params, offsets, strict=True))
    return BucketLayout(_in_order(slots), shards, numel)


def _in_order(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Sort by offset. A slot without elements may lie where the next begins: it comes first."""
    return tuple(sorted(slots, key=lambda slot: (slot.offset, slot.numel)))
