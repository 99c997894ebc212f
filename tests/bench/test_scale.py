"""``bench_scale.py``: what is counted follows from buckets and units, and what is timed has as many of them."""

from __future__ import annotations

import json
from pathlib import Path

import bench_scale
import pytest
import torch
import torch.distributed as dist
from scale_model import LLAMA_70B, SHRINK, Shapes, layouts
from zero_optim.comm import transport

import zero_kernels

LAYERS = 2
SMALL = Shapes(layers=LAYERS, hidden=8192, ffn=28672, kv=1024, vocab=32000)
RANKS = (8, 16384)
ROOT_AND_BLOCKS = 1 + LAYERS
FAILURES = 2  # asked for when the buckets are made, and when the state is


@pytest.fixture(scope="module")
def rows():
    """By ranks and stage."""
    measured = bench_scale.measure(RANKS, 2, lambda line: None, SMALL)
    return {(row.ranks, row.backend): row for row in measured}


REPLICAS, SHARDS = 2048, 8


@pytest.fixture(scope="module")
def grid():
    """The same on a mesh, by stage."""
    measured = bench_scale.measure((REPLICAS * SHARDS,), 2, lambda line: None, SMALL, replicas=REPLICAS)
    return {row.backend: row for row in measured}


def test_a_grid_reduces_within_a_replica_and_then_across(grid, rows):
    """Buckets, padding and gathers are those of the eight ranks that share; alarms and places are of all ranks."""
    two, three = grid["stage2"], grid["stage3"]
    flat = rows[SHARDS, "stage2"]
    assert (two.ranks, two.replicas, two.buckets, two.timed_buckets) == (16384, 2048, flat.buckets, flat.buckets)
    assert (two.largest, two.padding) == (flat.largest, flat.padding)
    assert two.exchange == rows[16384, "stage2"].exchange and three.exchange == rows[16384, "stage3"].exchange
    # One all-reduce a bucket is across the replicas, and one is the exchange.
    assert two.collectives["step"] == {
        "reduce_scatter": two.buckets,
        "all_gather": two.buckets,
        "all_reduce": two.buckets + 1,
    }
    assert three.collectives["step"] == {
        "reduce_scatter": ROOT_AND_BLOCKS,
        "all_gather": 1 + 2 * LAYERS,
        "all_reduce": ROOT_AND_BLOCKS + 1,
    }
    assert two.object_bytes["step"] == three.object_bytes["step"] == 0
    assert set(two.timed) - set(flat.timed) == {"mesh"}


def test_the_shapes_are_those_of_llama_70b():
    assert (sum(LLAMA_70B.numels), len(LLAMA_70B.numels)) == (68_976_648_192, 723)
    assert all(numel % SHRINK == 0 for numel in LLAMA_70B.numels)


@pytest.mark.parametrize("ranks", bench_scale.RANKS)
@pytest.mark.parametrize("stage", bench_scale.STAGES)
def test_padding_is_under_one_percent(ranks, stage):
    buckets = layouts(LLAMA_70B, ranks, stage)
    assert sum(len(bucket.slots) for bucket in buckets) == 723
    assert sum(bucket.numel for bucket in buckets) < 1.01 * sum(LLAMA_70B.numels)


def test_what_is_timed_has_as_many_buckets_as_the_true_shapes(rows):
    assert [(row.parameters, row.timed_buckets - row.buckets) for row in rows.values()] == [(9 * LAYERS + 3, 0)] * 4


@pytest.mark.parametrize("ranks", RANKS)
def test_stage_2_communicates_by_the_bucket(rows, ranks):
    """Construction: three collectives connect, and two more for buckets; a broadcast a bucket. In the first step the
    ranks learn."""
    row = rows[ranks, "stage2"]
    buckets = row.buckets
    connect = {"reduce_scatter": 2, "all_gather": 2, "all_reduce": 1 + FAILURES}
    assert row.collectives["construction"] == {**connect, "broadcast": buckets, "gather_objects": 4}
    step = {"reduce_scatter": buckets, "all_gather": buckets, "all_reduce": 1}
    assert row.collectives["step"] == step
    assert row.collectives["first step"] == {**step, "all_reduce": 2, "gather_objects": 1}


@pytest.mark.parametrize("ranks", RANKS)
def test_stage_3_communicates_by_the_unit(rows, ranks):
    """The root is gathered once, a block for forward and for backward. Each unit is asked for failures once."""
    row = rows[ranks, "stage3"]
    assert row.buckets == ROOT_AND_BLOCKS
    connect = {"reduce_scatter": 3, "all_gather": 3, "all_reduce": 2 + ROOT_AND_BLOCKS + FAILURES}
    assert row.collectives["construction"] == {**connect, "broadcast": ROOT_AND_BLOCKS, "gather_objects": 7}
    assert row.collectives["step"] == {
        "reduce_scatter": ROOT_AND_BLOCKS,
        "all_gather": 1 + 2 * LAYERS,
        "all_reduce": 1,
    }


def test_the_exchange_has_two_numbers_a_parameter_and_two_a_rank(rows):
    for (ranks, stage), row in rows.items():
        totals, alarms = 2, 9 + (64 if stage == "stage3" else 0)
        assert row.exchange == 4 * (totals + alarms + 2 * (9 * LAYERS + 3) + 2 * ranks)


def test_objects_grow_with_the_ranks_and_not_with_the_parameters(rows):
    """A step gathers none. At stage 2 what a rank sends elsewhere is at most a hash, and what it says it does."""
    for row in rows.values():
        assert row.object_bytes["step"] == 0
    for when in ("construction", "first step"):
        assert 0 < rows[16384, "stage2"].object_bytes[when] < 16384 * 200


def test_a_small_bucket_is_timed_by_part_at_stage_2(rows):
    for (_, stage), row in rows.items():
        if stage == "stage3":
            assert row.of_bucket is None
        else:
            assert set(row.of_bucket) == {"pack", "adam_step", "all_gather"} and min(row.of_bucket.values()) > 0


def test_kernels_are_left_out_of_prepared_calls_too():
    pack, bucket = zero_kernels.Prepared("pack"), torch.ones(256)
    with bench_scale._without_kernels():
        pack([torch.ones(3)], [0], bucket, 1.0, None)
    assert bucket.tolist() == [1.0] * 256


def test_everything_is_as_before(rows):
    """The kernels, the transport and the process group."""
    assert transport.used() is None and not dist.is_initialized()
    bucket = torch.ones(256)
    torch.ops.zero_kernels.pack([torch.full((3,), 4.0)], [0], bucket, 0.5, None)
    assert bucket[:4].tolist() == [2.0, 2.0, 2.0, 0.0]


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(run_here, draws_again, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_scale.measure, "__defaults__", (SMALL,))
    first = run_here(bench_scale.main)("--ranks", "8", "64", "--rounds", "2", "--out", ".")
    assert first.code == 0, first.err
    (file,) = Path().glob("*-scale.json")
    (plot,) = Path().glob("*-scale.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["ranks"], row["backend"]) for row in rows] == [(n, s) for n in (8, 64) for s in ("stage2", "stage3")]
    assert all(set(row["timed"]) == {"construction", "first step", "hooks", "step", "zero_grad"} for row in rows)
    assert all(text in first.out for text in ("padding", "construction: broadcast", "a small bucket: all, µs"))
    draws_again(first, file, plot)


def test_one_rank_is_refused(run_here, refuses):
    refuses("--ranks", "8", "1", saying=["bench_scale.py: --ranks", "is of 2 at least"], by=run_here(bench_scale.main))


@pytest.mark.parametrize("replicas", ["3", "8", "0"])
def test_replicas_that_leave_nobody_to_share_are_refused(run_here, refuses, replicas):
    refuses("--ranks", "8", "--replicas", replicas, saying=[f"--replicas {replicas}:"], by=run_here(bench_scale.main))
