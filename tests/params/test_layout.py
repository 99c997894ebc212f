"""The layout: integers that every rank computes alike."""

import math
import random
from pathlib import Path

import pytest
from zero_optim import rules
from zero_optim.memory import KNOWN
from zero_optim.params.layout import ROW, BucketLayout, Slot, WholeParameters, bucket_capacities, build_layout


def _random_layout(seed, shards):
    draw = random.Random(seed)
    numels = {index: draw.choice([0, 1, 5, 127, 128, 129, 1000, 5000]) for index in range(3, 40)}
    kinds = {index: draw.choice("ab") for index in numels}
    order = draw.sample(list(numels), len(numels))
    capacities = bucket_capacities(numels, kinds, 8192, {"a": 2, "b": 4}, shards)
    return numels, kinds, order, capacities, build_layout(numels, kinds, order, capacities, shards)


@pytest.mark.parametrize(
    ("rows", "buckets"),
    [
        ([9, 3, 2, 12], [[0, 1], [2, 3]]),  # 12 fit exactly; less than a quarter goes on with what does not fit
        ([3, 12, 4], [[0], [1], [2]]),  # a quarter is enough
        ([13, 1, 13, 1, 13, 9], [[0], [2], [4], [1, 3, 5]]),  # what is too large is alone, and closes no small bucket
        ([13, 3, 13, 1, 9], [[0], [1], [2], [3, 4]]),  # it does close a quarter
        ([12, 2], [[0, 1]]),  # a small last bucket joins the one before
        ([2, 12, 2], [[0, 1], [2]]),  # unless that would then have more than 15
        ([5, 13, 1], [[0, 2], [1]]),  # which may lie before one that is too large
        ([13, 1, 13], [[0], [1], [2]]),  # there is nothing to join
    ],
)
def test_small_parameters_join_their_neighbours(rows, buckets):
    """Under a capacity of twelve rows: a quarter is three."""
    numels = {param: count * ROW for param, count in enumerate(rows)}
    made = build_layout(numels, dict.fromkeys(numels, "a"), [*numels], {"a": 12 * ROW}, shards=1)
    assert sorted([slot.param for slot in bucket.slots] for bucket in made) == sorted(buckets)


def test_a_bucket_is_never_more_than_a_quarter_of_its_kind():
    kinds = {0: "a", 1: "a", 2: "b"}
    capacities = bucket_capacities({0: 6 * ROW, 1: 2 * ROW, 2: 1}, kinds, 2**20, {"a": 2, "b": 4}, shards=2)
    assert capacities == {"a": 2 * ROW, "b": ROW}
    assert bucket_capacities({0: 10**6}, {0: "a"}, 1000, {"a": 2}, shards=2) == {"a": 500}


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_the_parts_of_a_slot_are_its_pieces_in_all_shards(shards):
    *_, buckets = _random_layout(shards, shards)
    for bucket in buckets:
        pieces = [(shard, piece) for shard in range(shards) for piece in bucket.pieces(shard) if piece.numel]
        for slot in bucket.slots:
            assert [*bucket.parts(slot)] == [(shard, piece) for shard, piece in pieces if piece.slot == slot]


def test_a_shard_without_elements_has_empty_pieces():
    (bucket,) = build_layout({0: 1, 1: 0}, {0: "a", 1: "a"}, [0, 1], {"a": 10**6}, shards=4)
    assert bucket == BucketLayout((Slot(0, 0, 1), Slot(1, ROW, 0)), shards=4, numel=4 * ROW)
    assert [[piece.numel for piece in bucket.pieces(shard)] for shard in range(4)] == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert bucket.row_slot(0) == [0]
    assert bucket.row_slot(3) == [-1]


def test_a_policy_decides_where_shards_cut():
    """One that lets no parameter be cut, for two ranks: each of two has a shard to itself."""
    (bucket,) = build_layout({0: 5 * ROW, 1: 3}, {0: "a", 1: "a"}, [0, 1], {"a": 10**6}, 2, {"a": WholeParameters()})
    assert bucket.shard_numel == 5 * ROW
    assert [[piece.numel for piece in bucket.pieces(shard)] for shard in (0, 1)] == [[5 * ROW, 0], [0, 3]]
    (usual,) = build_layout({0: 5 * ROW, 1: 3}, {0: "a", 1: "a"}, [0, 1], {"a": 10**6}, 2)
    assert [[piece.numel for piece in usual.pieces(shard)] for shard in (0, 1)] == [[3 * ROW, 0], [2 * ROW, 3]]


def _of_whole_parameters(numels, order, shards, costs=None):
    kinds = dict.fromkeys(range(len(numels)), "bf16")
    sizes = dict(enumerate(numels))
    capacities = bucket_capacities(sizes, kinds, None, {"bf16": 2}, shards)
    return build_layout(sizes, kinds, order, capacities, shards, {"bf16": WholeParameters()}, costs or {})


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 16])
def test_whole_parameters_are_in_one_shard_each(shards):
    numels = [7, 4 * ROW, 3 * ROW + 1, 4 * ROW, 0, ROW, 12 * ROW, 4 * ROW, 2 * ROW] * 3
    order = list(reversed(range(len(numels))))
    layouts = _of_whole_parameters(numels, order, shards)
    found = {}
    for layout in layouts:
        offsets = [slot.offset for slot in layout.slots]
        assert offsets == sorted(offsets) and all(offset % ROW == 0 for offset in offsets)
        assert layout.numel % (shards * ROW) == 0
        for shard in range(shards):
            for piece in layout.pieces(shard):
                if piece.numel:
                    assert piece.in_param == 0 and piece.numel == piece.slot.numel
                    assert piece.slot.param not in found
                    found[piece.slot.param] = shard
    assert sorted(found) == [index for index, numel in enumerate(numels) if numel]
    # Of any order within a bucket come the same shards.
    if shards > 1:
        whole = WholeParameters()
        for layout in layouts:
            params = [slot.param for slot in reversed(layout.slots)]
            offsets, numel = whole.place(params, dict(enumerate(numels)), shards)
            there = {(param, *divmod(offset, numel // shards)) for param, offset in zip(params, offsets, strict=True)}
            here = {(slot.param, *divmod(slot.offset, layout.shard_numel)) for slot in layout.slots if slot.numel}
            assert numel == layout.numel and _piles(here) == _piles(of for of in there if numels[of[0]])


def _piles(places):
    """(parameter, shard, where it begins there) of each, whatever the number of the shard."""
    piles = {}
    for param, shard, start in places:
        piles.setdefault(shard, set()).add((param, start))
    return {frozenset(pile) for pile in piles.values()}


@pytest.mark.parametrize("costs", [{}, {0: 1, 1: 9, 2: 5, 3: 1, 4: 9, 5: 5}], ids=["elements", "costs"])
def test_who_has_least_to_do_gets_the_dearest_shard_of_the_next_bucket(costs):
    """Three buckets of two, each with a large and a small parameter, for two ranks."""
    numels, kinds = {i: (5 if i % 2 else 2) * ROW for i in range(6)}, dict.fromkeys(range(6), "a")
    layouts = build_layout(numels, kinds, [*range(6)], {"a": 3 * ROW}, 2, {"a": _TwoByTwo()}, costs)
    homes = [{slot.param: layout.shard_of(slot) for slot in layout.slots} for layout in layouts]
    if costs:  # 9 and 1, then 5 and 1, then 9 and 5
        assert homes == [{0: 1, 1: 0}, {2: 1, 3: 0}, {4: 1, 5: 0}]
    else:  # 5 and 2 each
        assert homes == [{0: 1, 1: 0}, {2: 0, 3: 1}, {4: 1, 5: 0}]
    assert all(layout.numel == 10 * ROW for layout in layouts)


class _TwoByTwo(WholeParameters):
    def split(self, params, numels, capacity, shards):
        return [[*params[start : start + 2]] for start in range(0, len(params), 2)]


def test_a_shard_with_an_empty_parameter_at_its_end_is_moved():
    layout = BucketLayout((Slot(0, 0, ROW), Slot(1, ROW, 7), Slot(2, 2 * ROW, 0)), 2, 2 * ROW)
    assert layout.reordered([1, 0]).slots == (Slot(1, 0, 7), Slot(2, ROW, 0), Slot(0, ROW, ROW))


@pytest.mark.parametrize(("shards", "most"), [(2, 1.01), (3, 1.01), (4, 1.01), (8, 1.01), (16, 1.02), (32, 1.06)])
def test_ranks_multiply_about_as_much(shards, most):
    """The matrices of Llama 2 70B."""
    shapes = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *[(28672, 8192)] * 2, (8192, 28672)] * 80
    costs = {number: rules.Muon().cost(shape) for number, shape in enumerate(shapes)}
    layouts = _of_whole_parameters([rows * columns for rows, columns in shapes], [*costs][::-1], shards, costs)
    multiplied = [0] * shards
    for layout in layouts:
        for slot in layout.slots:
            multiplied[layout.shard_of(slot)] += costs[slot.param]
    assert max(multiplied) * shards <= most * sum(multiplied)


def test_an_empty_parameter_comes_before_the_slot_that_begins_where_it_lies():
    numels, kinds = {0: 0, 1: 16, 2: 64}, dict.fromkeys(range(3), "a")
    (layout,) = build_layout(numels, kinds, [2, 1, 0], {"a": 100}, 2, {"a": WholeParameters()})
    assert layout.slots == (Slot(2, 0, 64), Slot(0, ROW, 0), Slot(1, ROW, 16))


@pytest.mark.parametrize(("shards", "most"), [(2, 0.05), (4, 0.05), (8, 0.05), (16, 0.05), (64, 0.07)])
def test_padding_of_whole_matrices(shards, most):
    """The matrices of Llama 2 7B, 224 of them."""
    numels = [4096 * 4096] * 4 + [4096 * 11008] * 3
    layouts = _of_whole_parameters(numels * 32, list(reversed(range(len(numels) * 32))), shards)
    held = sum(layout.numel for layout in layouts)
    padding = held / (32 * sum(numels)) - 1
    assert padding < most


def _llama(layers, hidden, ffn, kv, vocab=32000):
    """Elements of each parameter, as the Llama 2 models have them."""
    attention = [hidden * hidden, hidden * kv, hidden * kv, hidden * hidden]
    block = [*attention, *[hidden * ffn] * 3, hidden, hidden]
    return [vocab * hidden, *block * layers, hidden, vocab * hidden]


MODELS = {
    "70 B": _llama(80, 8192, 28672, 1024),
    "7 B": _llama(32, 4096, 11008, 4096),
    "1.1 B": _llama(22, 2048, 5632, 256),
    "21 M": _llama(4, 256, 1024, 256),
}


def _default_layout(sizes, shards, cap_bytes=None):
    """In the order in which backward makes the gradients, bf16."""
    numels, kinds, order = dict(enumerate(sizes)), dict.fromkeys(range(len(sizes)), "bf16"), range(len(sizes))[::-1]
    capacities = bucket_capacities(numels, kinds, cap_bytes, {"bf16": 2}, shards)
    return build_layout(numels, kinds, order, capacities, shards)


@pytest.mark.parametrize("shards", [8, 64, 1024, 16384])
@pytest.mark.parametrize("model", ["70 B", "7 B", "1.1 B"])
def test_padding_stays_under_one_percent_however_many_ranks(model, shards):
    buckets = _default_layout(MODELS[model], shards)
    assert len(buckets) >= 4
    assert sum(bucket.numel for bucket in buckets) < 1.01 * sum(MODELS[model])


@pytest.mark.parametrize(("shards", "mebibytes"), [(8, 100), (64, 100), (1024, 100), (16384, 512)])
def test_the_default_grows_with_the_ranks(shards, mebibytes):
    """At 100 MiB the matrices of the MLP, 448 MiB each, and those of queries and outputs, 128, are alone; keys and
    values, 32 together, take the norms along. At 512 MiB these four of attention and the norms are one bucket. The
    embedding and the head have one each."""
    sizes = MODELS["70 B"]
    alone, together = (3 + 2, 1) if mebibytes == 100 else (3, 1)
    assert len(_default_layout(sizes, shards)) == 80 * (alone + together) + 2
    kinds = dict.fromkeys(range(len(sizes)), "bf16")
    of_default = bucket_capacities(dict(enumerate(sizes)), kinds, None, {"bf16": 2}, shards)
    assert of_default == {"bf16": mebibytes * 2**20 // 2}
    given = bucket_capacities(dict(enumerate(sizes)), kinds, 25 * 2**20, {"bf16": 2}, shards)
    assert given == {"bf16": 25 * 2**20 // 2}, "a cap that was given holds"
    on_cpu = bucket_capacities(dict(enumerate(sizes)), kinds, None, {"bf16": 2}, shards, on_cpu=True)
    assert on_cpu == {"bf16": max(25 * 2**20 // 2, 128 * ROW * shards)}


_QWEN3_LAYER = (4096 * 2048, 512 * 2048, 512 * 2048, 2048 * 4096, 128, 128)  # queries, keys, values, output, norms
_QWEN3_LAYER += (128 * 2048, *[768 * 2048] * 3 * 128, 2048, 2048)  # router, experts, norms
OF_THE_DOCS = {
    "Llama 2 7B": KNOWN["llama-2-7b"].numels,
    "Llama 3 8B": KNOWN["llama-3-8b"].numels,
    "Llama 3 70B": KNOWN["llama-3-70b"].numels,
    "Qwen3 30B-A3B": (151936 * 2048, *_QWEN3_LAYER * 48, 2048, 151936 * 2048),
}


@pytest.mark.parametrize("model", OF_THE_DOCS)
def test_the_table_of_the_docs(model):
    sizes = OF_THE_DOCS[model]
    given, default = (_default_layout(sizes, 8, cap_bytes) for cap_bytes in (25 * 2**20, None))
    mebibytes = [bucket.numel * 2 / 2**20 for bucket in default]
    figures = [sum(sizes), len(sizes), len(given), len(default), round(min(mebibytes)), math.ceil(max(mebibytes))]
    page = (Path(__file__).parents[2] / "docs" / "step.md").read_text()
    assert f"| {' | '.join([model, *(f'{figure:,}' for figure in figures)])} |" in page


def test_a_quarter_of_a_small_model_comes_before_little_padding():
    """21 M parameters are fewer than one bucket of 16,384 ranks may hold. Three buckets have 11 rows a shard; 10 do."""
    sizes = MODELS["21 M"]
    (first, middle, last) = (bucket.numel for bucket in _default_layout(sizes, 16384))
    assert (first, middle, last) == (4 * 2**21, 3 * 2**21, 4 * 2**21)
    assert sum(sizes) == 20_580_608
