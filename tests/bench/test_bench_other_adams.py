"""``bench_other_adams.py``: a package's Adam has a row, and one that does not work a reason."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import bench_other_adams
import torch
from recorded import record_of


class CpuAdam(torch.optim.AdamW):
    def __init__(self, params, adamw_mode, **options) -> None:
        assert adamw_mode
        super().__init__(params, **options)


def test_a_run(monkeypatch, tmp_path):
    monkeypatch.setitem(bench_other_adams.OTHERS, "deepspeed", ("json.tool", "torch"))  # a package that is there
    monkeypatch.setitem(sys.modules, "json.tool", SimpleNamespace(DeepSpeedCPUAdam=CpuAdam))
    record = record_of(monkeypatch, tmp_path, bench_other_adams, "--device", "cpu", "--numel", "4096", "--rounds", "2")
    assert {"torch_pipeline", "deepspeed", "copy"} <= {row["backend"] for row in record["rows"]}
    assert record["baselines"] == {"deepspeed": torch.__version__, "apex": "not for cpu", "te": "not for cpu"}


def test_a_package_that_does_not_build(monkeypatch):
    monkeypatch.setitem(bench_other_adams.OTHERS, "deepspeed", ("json.tool", "torch"))
    monkeypatch.setitem(sys.modules, "json.tool", SimpleNamespace())
    assert bench_other_adams.usable("deepspeed", "cpu").startswith("does not work: ")
    monkeypatch.setitem(bench_other_adams.OTHERS, "deepspeed", ("no_such_package.adam", "torch"))
    assert bench_other_adams.usable("deepspeed", "cpu") == "not installed"
