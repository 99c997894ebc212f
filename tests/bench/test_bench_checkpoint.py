"""``zero-optim bench checkpoint``: the slower rank counts, the disk is the measure, and a run of few bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from zero_optim.bench import checkpoints
from zero_optim.bench.checkpoints import DISK, OURS, Lap, make_rows

NAMES = ["disk", "torch.save", "fsdp2 dcp", "fsdp2 dcp async", "ours", "ours background"]


def test_the_slower_rank_counts_and_the_disk_is_the_measure():
    of_ranks = [
        {DISK: [Lap(1.0, 1.0, 2.0), Lap(1.0, 2.0, 2.0), Lap(1.0, 1.5, 2.0)], OURS: [Lap(0.1, 2.0, 4.0)] * 3},
        {DISK: [Lap(2.0, 2.0, 1.0), Lap(0.5, 1.0, 1.0), Lap(0.5, 1.0, 1.0)], OURS: [Lap(0.2, 1.0, 5.0)] * 3},
    ]
    extra = [
        {DISK: {"save": 1, "load": 2}, OURS: {"save": 9, "load": 3}},
        {DISK: {"save": 5, "load": 1}, OURS: {"save": 7, "load": 8}},
    ]
    disk, ours = make_rows(of_ranks, extra, 100, 50, 2)
    assert disk.save[0] == 2000 and disk.load[0] == 2000 and disk.of_disk == {"save": 1.0, "load": 1.0}
    assert ours.save[0] == 2000 and ours.blocked[0] == 200 and ours.load[0] == 5000
    assert ours.of_disk == {"save": 1.0, "load": 0.4} and ours.extra == {"save": 9, "load": 8}
    assert (ours.written, ours.numel, ours.ranks, ours.rounds) == (100, 50, 2, 3)


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(bench, draws_again):
    pytest.importorskip("matplotlib")
    first = bench("checkpoint", "--numel", "2Mi", "--rounds", "1", "--out", ".")
    assert first.code == 0, first.err
    (file,) = Path().glob("*-checkpoint.json")
    (plot,) = Path().glob("*-checkpoint.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert [row["backend"] for row in rows] == NAMES
    for row in rows:
        # Of each parameter the value and two moments, but for rows that are cut off: all of it is written.
        assert row["written"] == pytest.approx(12 * row["numel"], rel=1e-3)
        assert all(row[part][0] > 0 for part in ("save", "load", "blocked"))
    of = {row["backend"]: row for row in rows}
    assert of["torch.save"]["extra"]["load"] > 0.4 * of["torch.save"]["written"]  # a whole list of tensors
    assert of["ours"]["extra"]["load"] < 0.4 * of["ours"]["written"]
    draws_again(first, file, plot)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["checkpoint", "--device", "cuda"], ["--device cuda", "measured on the CPU"]),
        (["checkpoint", "--dtypes", "bf16"], ["--dtypes bf16", "fp32"]),
        (["checkpoint", "--tokens", "64"], ["--tokens", "checkpoint does not take it"]),
    ],
)
def test_what_it_cannot_have(bench, arguments, parts):
    refused = bench(*arguments)
    assert refused.code == 2 and all(part in refused.err for part in parts)


def test_the_model_has_about_as_many_parameters():
    for numel in (2**21, 2**25):
        there = sum(parameter.numel() for parameter in checkpoints.make_model(numel).parameters())
        assert there == pytest.approx(numel, rel=0.03)
