"""``bench_scale.py``: what is counted follows from buckets and units, what is timed has as many."""

from __future__ import annotations

import bench_scale
import pytest
import torch
import torch.distributed as dist
from bench_scale import SHRINK, TIMED, layouts, scale_rows
from zero_optim.comm import transport
from zero_optim.memory import models

LAYERS = 2
SMALL = models.llama("small", LAYERS, 8192, 28672, 1024, 32000)
ROOT_AND_BLOCKS = 1 + LAYERS
REPLICAS, SHARDS = 2048, 8


@pytest.fixture(scope="module")
def rows():
    """By ranks and stage; and, of a mesh, by stage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flat = {(row["ranks"], row["backend"]): row for row in scale_rows(SMALL, (8, 16384), 1, 2)}
    mesh = {row["backend"]: row for row in scale_rows(SMALL, (16384,), REPLICAS, 2)}
    torch.set_num_threads(threads)
    return flat, mesh


def test_the_shapes_are_those_of_llama_70b():
    assert (TIMED.numel, len(TIMED.numels)) == (68_976_648_192, 723)
    assert all(numel % SHRINK == 0 for numel in TIMED.numels)


@pytest.mark.parametrize("ranks", bench_scale.RANKS)
@pytest.mark.parametrize("stage", bench_scale.STAGES)
def test_padding_is_under_one_percent(ranks, stage):
    buckets = layouts(TIMED, ranks, stage)
    assert sum(len(bucket.slots) for bucket in buckets) == 723
    assert sum(bucket.numel for bucket in buckets) < 1.01 * TIMED.numel


@pytest.mark.slow
def test_what_is_timed_has_as_many_buckets_as_the_true_shapes(rows):
    for row in (*rows[0].values(), *rows[1].values()):
        assert (row["parameters"], row["timed_buckets"]) == (9 * LAYERS + 3, row["buckets"])
        assert {"construction", "first step", "hooks", "step", "zero_grad"} <= set(row["timed"])


def test_stage_2_communicates_by_the_bucket(rows):
    for ranks in (8, 16384):
        row = rows[0][ranks, "stage2"]
        step = {"reduce_scatter": row["buckets"], "all_gather": row["buckets"], "all_reduce": 1}
        assert row["collectives"]["step"] == step
        assert row["collectives"]["first step"] == {**step, "all_reduce": 2, "gather_objects": 1}
        assert row["collectives"]["construction"]["broadcast"] == row["buckets"]


def test_stage_3_communicates_by_the_unit(rows):
    """The root and the last block are gathered once, the others for forward and for backward."""
    step = {"reduce_scatter": ROOT_AND_BLOCKS, "all_gather": 2 * LAYERS, "all_reduce": 1}
    for ranks in (8, 16384):
        row = rows[0][ranks, "stage3"]
        assert row["buckets"] == ROOT_AND_BLOCKS and row["collectives"]["step"] == step
        assert row["collectives"]["construction"]["broadcast"] == ROOT_AND_BLOCKS


def test_a_mesh_reduces_within_a_replica_and_then_across(rows):
    """Buckets, padding and gathers are those of eight ranks; the exchange is of all ranks."""
    flat, mesh = rows
    for stage, two in mesh.items():
        of_shards, of_world = flat[SHARDS, stage], flat[16384, stage]
        assert (two["replicas"], two["buckets"], two["largest"], two["padding"]) == (
            *(REPLICAS, of_shards["buckets"], of_shards["largest"], of_shards["padding"]),
        )
        assert two["exchange"] == of_world["exchange"] and "mesh" in two["timed"]
        across = of_shards["collectives"]["step"] | {"all_reduce": two["buckets"] + 1}
        assert two["collectives"]["step"] == across


def test_what_grows_with_the_ranks(rows):
    """The exchange has two numbers a parameter and a rank each, and a hash of 64 bits; steps gather no object."""
    for (ranks, stage), row in rows[0].items():
        totals, alarms = 3, 9 + 3 + 2 * 64 + (64 if stage == "stage3" else 0)
        assert row["exchange"] == 4 * (totals + alarms + 2 * (9 * LAYERS + 3) + 2 * ranks)
        assert row["object_bytes"]["step"] == 0
    for when in ("construction", "first step"):
        assert 0 < rows[0][16384, "stage2"]["object_bytes"][when] < 16384 * 200


def test_everything_is_as_before(rows):
    """The kernels, the transport and the process group."""
    assert transport.used() is None and not dist.is_initialized()
    bucket = torch.ones(256)
    with bench_scale.without_kernels():
        torch.ops.zero_kernels.pack([torch.full((3,), 4.0)], [0], bucket, 0.5, None)
    torch.ops.zero_kernels.pack([torch.full((3,), 4.0)], [0], bucket, 0.5, None)
    assert bucket[:4].tolist() == [2.0, 2.0, 2.0, 0.0]


def test_a_run(ran, monkeypatch):
    monkeypatch.setattr(bench_scale, "TIMED", SMALL)
    outcome, rows = ran(bench_scale.main, "--ranks", "8", "64", "--rounds", "2")
    assert [(row["ranks"], row["backend"]) for row in rows] == [
        (8, "stage2"),
        (8, "stage3"),
        (64, "stage2"),
        (64, "stage3"),
    ]
    assert "padding" in outcome.out


@pytest.mark.parametrize("replicas", ["3", "8"])
def test_replicas_that_leave_no_shard_group_are_refused(run_here, replicas):
    outcome = run_here(bench_scale.main)("--ranks", "8", "--replicas", replicas)
    assert outcome.code == 2 and f"--replicas {replicas}: a divisor of the 8 ranks" in outcome.err
