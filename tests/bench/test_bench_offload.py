"""``bench_offload.py``: bytes are counted, stores are compared with what bounds them, and rows add up."""

from __future__ import annotations

import os

import bench_offload
import pytest
import torch
from bench_offload import EXACT, NONE, DiskLink, Link, Work, row_of
from zero_optim.errors import ZeroOptimError

CPU = torch.device("cpu")
STEP = Work(2**21, "bf16", CPU, "nowhere")
REPORT = {"moved": {"to_device": 3}, "held": {"device": 1}}


def test_a_step_is_compared_with_the_longest_of_its_parts():
    def row(paged: float, report: dict = REPORT, **beside: float) -> dict:
        laps = {NONE: [10.0] * 3, "paged 0": [paged] * 3, **{f"paged 0/{what}": [ms] for what, ms in beside.items()}}
        update = {"update": [8.0] * 3} if not report["held"]["device"] else {}
        return row_of(STEP, "paged 0", report, laps | update)

    copied = row(20.0, copies=16.0)
    assert (copied["bound"], copied["fraction"], copied["versus"]) == ("copies", 0.8, 0.5)
    assert (copied["ms"], copied["beside"]) == (20.0, {"copies": 16.0})
    assert row(20.0, copies=4.0)["bound"] == NONE
    assert (row(40.0, copies=4.0, disk=30.0)["bound"], row(40.0, copies=4.0, disk=30.0)["fraction"]) == ("disk", 0.75)
    on_host = row(40.0, REPORT | {"held": {"device": 0, "host": 9}}, copies=4.0)
    assert on_host["bound"] == "update", "its update is the host's, and not None's on the device"
    assert "bound" not in row(20.0), "nothing is moved"


def test_a_store_that_computes_something_else_gives_no_figures(monkeypatch):
    """Smaller state rounds, so that its sum is another."""
    results = {NONE: 5.0, "cpu": 5.0, "paged 0 small": 9.0, "nvme": 5.0000001}
    monkeypatch.setattr(bench_offload, "make", lambda work, name: name)
    monkeypatch.setattr(bench_offload, "report_of", lambda name: {"result": results[name]})
    with pytest.raises(ZeroOptimError, match="parameters of nvme differ from those of None"):
        bench_offload.contest(STEP, list(results), 1)
    monkeypatch.setattr(bench_offload, "job_of", lambda name: [])
    with pytest.raises(KeyError, match="moved"):  # they are timed next, by bytes that these reports lack
        bench_offload.contest(STEP, list(results)[:-1], 1)


def test_the_link_copies_as_many_bytes(monkeypatch):
    link = Link(32 * 5000, CPU)
    pages = {page.data_ptr() for page in link._there}
    copied: list[tuple[int, bool]] = []
    copy = torch.Tensor.copy_

    def counted(target, source, *args, **kwargs):
        copied.append((target.nbytes, target.data_ptr() in pages))
        return copy(target, source, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    link.move(12_000, 5_001)
    assert copied == [(5000, True), (5000, True), (2000, True), (5000, False), (1, False)]


def test_the_disk_moves_as_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_offload, "BLOCK_BYTES", 8192)
    disk = DiskLink(str(tmp_path), 5 * 8192)
    moved: dict[str, list[tuple[int, int]]] = {"read": [], "write": []}
    for way in moved:
        real = getattr(os, f"p{way}v")

        def counted(file, memory, offset, way=way, real=real):
            moved[way].append((offset, len(memory[0])))
            return real(file, memory, offset)

        monkeypatch.setattr(os, f"p{way}v", counted)
    disk.move(100, 2 * 8192 + 100)
    assert moved["read"] == [(0, 4096)], "rounded up to what a disk takes"
    assert sorted(moved["write"]) == [(8192 * n, 8192 if n < 4 else 4096) for n in (2, 3, 4)]
    assert not list(tmp_path.iterdir()), "its file has no name"


def test_a_run(ran):
    _, found = ran(
        bench_offload.main, *["--numel", "128Ki", "--rounds", "1", "--device", "cpu", "--contenders"], *EXACT
    )
    rows = {(row["part"], row["backend"]): row for row in found}
    asleep = [f"{call}, {what}" for what in ("state", "all") for call in ("sleep", "wake")]
    names = {"step": EXACT, "forward": ["cpu", "nvme"], "sleep": asleep}
    assert [*rows] == [(part, name) for part, of_part in names.items() for name in of_part]
    state, half = 10 * 2**17, 2 * 2**17  # a split master
    nothing = dict.fromkeys(("to_device", "to_host", "read", "written"), 0)
    step = {name: rows["step", name] for name in EXACT}
    assert step[NONE]["moved"] == nothing and step[NONE]["held"]["device"] == state
    assert step["paged 0"]["moved"] == {**nothing, "to_device": state, "to_host": state}
    assert step["paged 0"]["held"] == {"device": 2 * state // 32, "host": state, "disk": 0}
    assert step["cpu"]["moved"] == {**nothing, "to_device": half, "to_host": 2 * half}, "gradients, and parameters"
    assert step["nvme"]["moved"] == dict.fromkeys(nothing, state)
    assert step["nvme"]["held"] == {"device": 2 * state // 32, "host": 6 * state // 32, "disk": state}
    assert set(step["nvme"]["beside"]) == {"copies", "disk"}
    assert rows["sleep", "sleep, state"]["held"]["host"] == state
    assert rows["sleep", "wake, all"]["held"]["host"] == state + half
    for row in found:
        assert row["p20"] <= row["ms"] <= row["p80"]
        if "fraction" in row:
            longest = max([step[NONE]["ms"]] * (row["part"] == "step") + [*row["beside"].values()])
            assert row["fraction"] == pytest.approx(longest / row["ms"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("name", "dtype"), [("ddp", "bf16"), ("nvme small", "fp32")])
def test_an_unknown_contender_is_refused(run_here, name, dtype):
    """A split master is of bf16 parameters."""
    outcome = run_here(bench_offload.main)("--contenders", name, "--dtype", dtype, "--device", "cpu", "--no-write")
    assert outcome.code == 2 and f"--contenders {name}: choose from None, paged 0" in outcome.err
