"""``bench_checkpoint.py``: the slower rank counts, the disk is the measure, and a run of few bytes."""

from __future__ import annotations

import bench_checkpoint
import pytest
from bench_checkpoint import make_rows
from pooled_ranks import on_pool

NAMES = ["disk", "fsdp2 dcp", "fsdp2 dcp async", "ours", "ours background"]


def test_the_slower_rank_counts_and_the_disk_is_the_measure():
    """Laps: emptying the folder, blocked, the rest of the save, preparing, loading."""
    one = {"disk": [[9.0, 1.0, 1.0, 9.0, 2.0]] * 3, "ours": [[0.0, 1.0, 3.0, 0.0, 4.0]] * 3}
    other = {"disk": [[0.0, 1.0, 0.0, 0.0, 1.0]] * 3, "ours": [[0.0, 2.0, 2.0, 0.0, 5.0]] * 3}
    extra = {"disk": {"save": 1, "load": 2}, "ours": {"save": 9, "load": 3}}
    more = {"disk": {"save": 5, "load": 1}, "ours": {"save": 7, "load": 8}}
    disk, ours = make_rows([(60, one, extra), (40, other, more)], 50)
    assert disk["save"] == [2, 2, 2] and disk["load"][0] == 2 and disk["of_disk"] == {"save": 1.0, "load": 1.0}
    assert ours["save"][0] == 4 and ours["blocked"][0] == 2 and ours["load"][0] == 5
    assert ours["of_disk"] == {"save": 0.5, "load": 0.4} and ours["extra"] == {"save": 9, "load": 8}
    assert [ours[key] for key in ("written", "numel", "ranks", "rounds")] == [100, 50, 2, 3]


@pytest.mark.slow
def test_a_run(ran, monkeypatch):
    monkeypatch.setattr(bench_checkpoint, "on_ranks", on_pool)
    _, rows = ran(bench_checkpoint.main, "--numel", "2Mi", "--rounds", "1")
    assert [row["backend"] for row in rows] == NAMES
    for row in rows:
        # of each parameter the value and two moments, but for rows that are cut off: all of it is written
        assert row["numel"] == pytest.approx(2**21, rel=0.03)
        assert row["written"] == pytest.approx(12 * row["numel"], rel=1e-3)
        assert row["save"][0] >= row["blocked"][0] > 0 < row["load"][0]
    of = {row["backend"]: row for row in rows}
    assert of["ours"]["extra"]["load"] < 0.4 * of["ours"]["written"]
