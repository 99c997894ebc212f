"""One device as rank 0 of 64, on the CPU at a small size: what it holds is what the planner says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import gpu_memory  # noqa: E402
from zero_optim import memory  # noqa: E402


def test_a_share_is_as_planned(tmp_path, capsys):
    out = tmp_path / "memory.json"
    assert gpu_memory.main(["--device", "cpu", "--params", "4e6", "--out", str(out)]) == 0
    assert "planned against allocated, rank 0 of 64" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert (record["parameters"], record["ranks"]) == (4_000_000, 64)
    shares = {share["stage"]: share for share in record["stages"]}
    assert [*shares] == [1, 2, 3]
    for stage, share in shares.items():
        assert abs(share["difference"]) < 0.01
        least = {1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}[stage] * 4e6
        assert least < share["held"]
        for peak in ("peak", "first_peak"):
            assert share["held"] < share[peak] < 1.01 * share[f"planned_{peak}"]
            if stage < 3:  # there it is an upper bound: not all is there at a time
                assert share[peak] == pytest.approx(share[f"planned_{peak}"], rel=0.01)


def test_a_plan_that_is_off_fails(monkeypatch):
    def short(plan, held, peak, first_peak):
        return gpu_memory.Share(plan.job.stage, held, held, 0.02, peak, peak, peak, peak, {})

    monkeypatch.setattr(gpu_memory, "compare", short)
    monkeypatch.setattr(gpu_memory, "STAGES", (3,))
    assert gpu_memory.main(["--device", "cpu", "--params", "2e6"]) == 1
    assert memory.gpt_of(2 * 10**6).numel == 2 * 10**6
