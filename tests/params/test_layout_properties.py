"""The layout for any parameters, orders, capacities and world sizes: no element lost, none twice, none astray."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from zero_optim.params.layout import ROW, BucketLayout, bucket_capacities, build_layout

BOUNDED = settings(derandomize=True, deadline=None, max_examples=150, database=None)
ITEMSIZES = {"half": 2, "wide": 4, "third": 4}
SIZES = st.one_of(
    st.sampled_from((0, 1, ROW - 1, ROW, ROW + 1, 2 * ROW, 7 * ROW + 3)),
    st.integers(0, 12 * ROW),
)


@dataclass(frozen=True)
class Model:
    """What a layout is made from. ``order`` holds the trainable parameters; the others are frozen."""

    numels: dict[int, int]
    kinds: dict[int, Hashable]
    order: list[int]
    capacities: dict[Hashable, int]
    shards: int

    def buckets(self, shards: int | None = None) -> list[BucketLayout]:
        return build_layout(self.numels, self.kinds, self.order, self.capacities, shards or self.shards)


@st.composite
def models(draw: st.DrawFn) -> Model:
    numels = dict(enumerate(draw(st.lists(SIZES, min_size=1, max_size=14))))
    kinds = {index: draw(st.sampled_from(sorted(ITEMSIZES))) for index in numels}
    order = draw(st.permutations(sorted(numels)))
    trainable = order[: draw(st.integers(1, len(order)))]
    if draw(st.booleans()):
        capacities = bucket_capacities(numels, kinds, draw(st.integers(1, 2**16)), ITEMSIZES, 1)
    else:
        capacities = {kind: ROW * draw(st.integers(1, 40)) for kind in ITEMSIZES}
    return Model(numels, kinds, list(trainable), capacities, draw(st.integers(1, 9)))


@given(models())
@BOUNDED
def test_every_element_is_in_exactly_one_shard(model: Model) -> None:
    """In rank order the pieces of a slot are the slot: no gap, nothing twice, nothing of another's."""
    found: dict[int, int] = {}
    for bucket in model.buckets():
        ends = [0] * len(bucket.slots)
        for shard in range(model.shards):
            for number, piece in enumerate(bucket.pieces(shard)):
                assert piece.slot == bucket.slots[number]
                if piece.numel:
                    assert piece.in_param == ends[number]
                    assert piece.in_shard >= 0 and piece.in_shard + piece.numel <= bucket.shard_numel
                    in_bucket = shard * bucket.shard_numel + piece.in_shard
                    assert in_bucket == piece.slot.offset + piece.in_param
                ends[number] += piece.numel
        for slot, end in zip(bucket.slots, ends, strict=True):
            assert end == slot.numel == model.numels[slot.param]
            assert found.setdefault(slot.param, end) == end
    assert sorted(found) == sorted(model.order)
    assert sum(len(bucket.slots) for bucket in model.buckets()) == len(model.order)


@given(models())
@BOUNDED
def test_slots_start_on_rows_of_their_own_and_the_bucket_is_padded_no_further_than_needed(model: Model) -> None:
    for bucket in model.buckets():
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ROW == 0
            assert slot.offset - end in range(ROW), "slots follow each other, with less than a row between"
            end = slot.offset + slot.numel
        assert bucket.numel == bucket.shard_numel * model.shards
        assert bucket.shard_numel % ROW == 0 and bucket.shard_numel > 0
        assert bucket.numel - max(end, 1) in range(model.shards * ROW)


@given(models())
@BOUNDED
def test_a_row_names_its_one_owner(model: Model) -> None:
    for bucket in model.buckets():
        rows = [owner for shard in range(model.shards) for owner in bucket.row_slot(shard)]
        expected = [-1] * (bucket.numel // ROW)
        for slot in bucket.slots:
            for row in range(slot.offset // ROW, -(-(slot.offset + slot.numel) // ROW) if slot.numel else 0):
                assert expected[row] == -1, "a row has two owners"
                expected[row] = slot.param
        assert rows == expected


@given(models())
@BOUNDED
def test_buckets_keep_the_order_in_which_gradients_become_ready(model: Model) -> None:
    """Within a bucket the order is kept; a bucket is complete, and so may leave, when its last slot is."""
    buckets = model.buckets()
    for bucket in buckets:
        places = [model.order.index(slot.param) for slot in bucket.slots]
        assert places == sorted(places) or 0 in (slot.numel for slot in bucket.slots)
    complete = [max(model.order.index(slot.param) for slot in bucket.slots) for bucket in buckets]
    assert complete == sorted(complete)
    assert all(len({model.kinds[slot.param] for slot in bucket.slots}) == 1 for bucket in buckets)


@given(models())
@BOUNDED
def test_capacities_are_respected_and_used(model: Model) -> None:
    """A larger parameter is alone, and others have 5/4 of the capacity at most. A bucket closes only where the next
    would not fit. The last alone may be less than 1/4 full, where it does not fit into the one before."""
    for kind in ITEMSIZES:
        capacity, least = model.capacities.get(kind, 0), model.capacities.get(kind, 0) // 4
        order = [index for index in model.order if model.kinds[index] == kind]
        fits = {index: model.numels[index] <= capacity for index in order}
        shared = []
        for bucket in (bucket for bucket in model.buckets() if model.kinds[bucket.slots[0].param] == kind):
            params = [slot.param for slot in bucket.slots]
            if not all(map(fits.__getitem__, params)):
                assert len(params) == 1
                continue
            assert bucket.slots[-1].offset + bucket.slots[-1].numel <= capacity + least
            shared.append(sum(-(-slot.numel // ROW) * ROW for slot in bucket.slots))
            behind = order[1 + max(map(order.index, params)) :]
            if any(map(fits.__getitem__, behind)):
                assert shared[-1] >= least and shared[-1] + model.numels[behind[0]] > capacity
        if len(shared) > 1:
            assert shared[-1] >= least or sum(shared[-2:]) > capacity + least


@given(models(), st.integers(1, 9))
@BOUNDED
def test_the_world_size_moves_no_slot(model: Model, shards: int) -> None:
    """So a shard boundary never changes what a slot is next to: only the padding at a bucket's end differs."""
    assert [bucket.slots for bucket in model.buckets()] == [bucket.slots for bucket in model.buckets(shards)]
    for own, other in zip(model.buckets(), model.buckets(shards), strict=True):
        rows, others = (
            [owner for shard in range(bucket.shards) for owner in bucket.row_slot(shard)] for bucket in (own, other)
        )
        common = min(len(rows), len(others))
        assert rows[:common] == others[:common]
        assert set(rows[common:] + others[common:]) <= {-1}


@given(st.lists(st.tuples(SIZES, st.sampled_from(sorted(ITEMSIZES))), min_size=1, max_size=14), st.floats(1, 2**16))
@BOUNDED
def test_a_capacity_is_the_bytes_asked_for_or_a_quarter_of_its_kind(entries: list, cap_bytes: float) -> None:
    numels = {index: numel for index, (numel, _) in enumerate(entries)}
    kinds = {index: kind for index, (_, kind) in enumerate(entries)}
    capacities = bucket_capacities(numels, kinds, cap_bytes, ITEMSIZES, 1)
    assert set(capacities) == set(kinds.values())
    for kind, capacity in capacities.items():
        total = sum(-(-numels[index] // ROW) * ROW for index in numels if kinds[index] == kind)
        assert capacity >= ROW, "a row fits everywhere"
        assert capacity == ROW or (capacity * ITEMSIZES[kind] <= cap_bytes and 4 * capacity <= total)
