"""The layout: integers that every rank computes alike."""

import random

import pytest
from zero_optim.params.layout import ROW, BucketLayout, Slot, bucket_capacities, build_layout


def _random_layout(seed, shards):
    draw = random.Random(seed)
    numels = {index: draw.choice([0, 1, 5, 127, 128, 129, 1000, 5000]) for index in range(3, 40)}
    kinds = {index: draw.choice("ab") for index in numels}
    order = draw.sample(list(numels), len(numels))
    capacities = bucket_capacities(numels, kinds, 8192, {"a": 2, "b": 4})
    return numels, kinds, order, capacities, build_layout(numels, kinds, order, capacities, shards)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_every_element_is_in_exactly_one_shard_of_one_bucket(seed, shards):
    numels, kinds, _, _, buckets = _random_layout(seed, shards)
    seen = {index: [0] * numel for index, numel in numels.items()}
    for bucket in buckets:
        assert len({kinds[slot.param] for slot in bucket.slots}) == 1
        assert bucket.numel % (shards * ROW) == 0
        for shard in range(shards):
            for piece in bucket.pieces(shard):
                assert 0 <= piece.in_shard <= piece.in_shard + piece.numel <= bucket.shard_numel
                for element in range(piece.in_param, piece.in_param + piece.numel):
                    seen[piece.slot.param][element] += 1
                    place = shard * bucket.shard_numel + piece.in_shard + element - piece.in_param
                    assert place == piece.slot.offset + element
    assert all(count == 1 for counts in seen.values() for count in counts)


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_name_their_parameter_and_padding_has_none(shards):
    numels, _, _, _, buckets = _random_layout(1, shards)
    for bucket in buckets:
        rows = [slot for shard in range(shards) for slot in bucket.row_slot(shard)]
        assert len(rows) == bucket.numel // ROW
        for row, param in enumerate(rows):
            owners = [
                slot.param
                for slot in bucket.slots
                if slot.offset < (row + 1) * ROW and row * ROW < slot.offset + slot.numel
            ]
            assert owners == ([] if param == -1 else [param])
    assert sum(numels.values()) == sum(slot.numel for bucket in buckets for slot in bucket.slots)


def test_buckets_keep_the_order_and_the_capacity():
    numels, kinds, order, capacities, buckets = _random_layout(2, 2)
    for kind in "ab":
        placed = [slot.param for bucket in buckets for slot in bucket.slots if kinds[slot.param] == kind]
        assert placed == [index for index in order if kinds[index] == kind]
    for bucket in buckets:
        last = bucket.slots[-1]
        capacity = capacities[kinds[last.param]]
        assert len(bucket.slots) == 1 or last.offset + numels[last.param] <= capacity
    last_places = [order.index(bucket.slots[-1].param) for bucket in buckets]
    assert last_places == sorted(last_places)


def test_a_bucket_is_never_more_than_a_quarter_of_its_kind():
    capacities = bucket_capacities({0: 6 * ROW, 1: 2 * ROW, 2: 1}, {0: "a", 1: "a", 2: "b"}, 2**20, {"a": 2, "b": 4})
    assert capacities == {"a": 2 * ROW, "b": ROW}
    assert bucket_capacities({0: 10**6}, {0: "a"}, 1000, {"a": 2}) == {"a": 500}


def test_a_shard_without_elements_has_empty_pieces():
    (bucket,) = build_layout({0: 1, 1: 0}, {0: "a", 1: "a"}, [0, 1], {"a": 10**6}, shards=4)
    assert bucket == BucketLayout((Slot(0, 0, 1), Slot(1, ROW, 0)), shards=4, numel=4 * ROW)
    assert [[piece.numel for piece in bucket.pieces(shard)] for shard in range(4)] == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert bucket.row_slot(0) == [0]
    assert bucket.row_slot(3) == [-1]


def test_a_policy_decides_where_shards_cut():
    """One that lets no parameter be cut, for two ranks: each of two has a shard to itself."""

    class Whole:
        def place(self, numels, shards):
            longest = -(-max(numels) // ROW) * ROW
            return [index * longest for index in range(len(numels))], shards * longest

    (bucket,) = build_layout({0: 5 * ROW, 1: 3}, {0: "a", 1: "a"}, [0, 1], {"a": 10**6}, 2, Whole())
    assert bucket.shard_numel == 5 * ROW
    assert [[piece.numel for piece in bucket.pieces(shard)] for shard in (0, 1)] == [[5 * ROW, 0], [0, 3]]
    (usual,) = build_layout({0: 5 * ROW, 1: 3}, {0: "a", 1: "a"}, [0, 1], {"a": 10**6}, 2)
    assert [[piece.numel for piece in usual.pieces(shard)] for shard in (0, 1)] == [[3 * ROW, 0], [2 * ROW, 3]]
