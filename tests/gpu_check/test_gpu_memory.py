"""One device as rank 0 of 64, on the CPU at a small size: what it holds is what the planner says."""

from __future__ import annotations

import json

import gpu_memory
import pytest
import torch
from zero_optim import memory


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


@pytest.mark.parametrize(("device", "percent", "code"), [("cpu", 2, 1), ("cuda", 2, 0), ("cuda", 4, 1)])
def test_a_plan_that_is_off_fails(device, percent, code, monkeypatch):
    """On a GPU, whose allocator gives whole blocks, by more than on a CPU."""

    def off(decoder, stage, on):
        return gpu_memory.Share(stage, 100 + percent, 100, percent / 100, 200, 200, 200, 200, {})

    monkeypatch.setattr(gpu_memory, "measure", off)
    assert gpu_memory.main(["--device", device, "--params", "2e6"]) == code


def test_what_is_off_is_measured_so(monkeypatch):
    plan = memory.plan(memory.of_decoder(memory.gpt_of(2 * 10**6), torch.bfloat16), memory.Job(stage=2, world=4))
    planned = gpu_memory.compare(plan, 0, 0, 0).planned
    assert gpu_memory.compare(plan, planned + planned // 50, 0, 0).difference == pytest.approx(0.02, abs=1e-6)
