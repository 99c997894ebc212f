"""``benchmarks/plot.py``: every committed result is drawn, and a table has the figures of nested keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lab
import plot
import pytest
import torch
from zero_optim.bench.record import CHECKOUT, Result
from zero_optim.errors import UsageError

RESULTS = sorted((CHECKOUT / "benchmarks" / "results").glob("*/*.json"))
RESULTS = [path for path in RESULTS if not path.stem.endswith("endurance")]  # nothing draws these rows any more
AMD = CHECKOUT / "benchmarks" / "results" / "amd-epyc-2-threads"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_committed_result_is_drawn(path, tmp_path, monkeypatch):
    """Pixels are left out, which take most of the time: other tests have them."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, target, **_: Path(target).touch())
    record = plot.read(path)
    written = plot.draw(record, tmp_path / "result.png")
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert bool(written) == bool(record["rows"])
    lines = plot.table_of(record).splitlines()
    assert all(any(line.startswith(row["backend"]) for line in lines) for row in record["rows"])


def test_a_table_has_nested_keys_and_bytes_as_mebibytes():
    table = plot.table_of(plot.read(AMD / "2026-11-26-5bfa983fa6-offload.json"))
    (paged,) = (line for line in table.splitlines() if line.split()[:3] == ["paged", "0", "step"])
    # ms, p20, p80; the bound's share of the step; the speed beside None's; then MiB
    assert paged.split()[4:] == [
        *("167.361", "159.615", "668.025", "0.599", "0.321", "copies", "1,100.6", "48.0", "768.0", "0.0")
    ]


def test_a_bar_of_offload_has_the_time_of_its_bound():
    rows = plot.read(AMD / "2026-11-26-5bfa983fa6-offload.json")["rows"]
    step, train = plot.of_times([plot.flat(row) for row in rows])
    none, paged = step[0].bars[:2]
    assert none.mark is None and paged.whiskers == (159.61476, 668.0255)
    assert paged.mark == pytest.approx(100.187, rel=1e-3), "the copies'"
    assert [len(line[0].bars) for line in (step, train)] == [7, 8]


def test_bandwidth_is_bars_of_one_size_and_lines_over_several():
    shares = {"yardstick": "copy", "copy_gbps": 8.0, "fraction": 0.5, "vs_torch": 2.0}
    rows = [
        {"op": "pack", "dtype": "bf16", "bytes": 4, "backend": name, "numel": numel, "gbps": gbps, **shares}
        for name, gbps in (("cpu", 4.0), ("cpu, zeros", 3.0), ("copy", 8.0))
        for numel in (1024, 2048)
    ]
    ((bars,),) = plot.of_bandwidth(rows[::2])
    assert [(bar.label, bar.value, bar.text, bar.mark) for bar in bars.bars] == [
        ("cpu", 4.0, "0.50, 2.00x", 8.0),
        ("cpu, zeros", 3.0, "0.50, 2.00x", 8.0),
    ]
    ((lines,),) = plot.of_bandwidth(rows)
    assert lines.lines == {"cpu": [(1024, 4.0), (2048, 4.0)], "copy": [(1024, 8.0), (2048, 8.0)]}


def test_without_matplotlib_one_line_says_why_there_is_no_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = Result(torch.device("cpu"), tmp_path)
    result.add([{"op": "calls", "backend": "ours", "dtype": "fp32", "numel": 8, "ms": 1.0, "p20": 1.0, "p80": 1.0}])
    lab.show(result)
    assert "no plot: " in (out := capsys.readouterr().out) and "pip install matplotlib" in out and "1.000" in out
    assert len(list(tmp_path.glob("*.json"))) == 1 and not list(tmp_path.glob("*.png"))


def test_lines_over_ranks_are_by_stage():
    rows = plot.read(AMD / "2026-11-24-40f4de1ca3-scale.json")["rows"]
    (line,) = plot.of_scale([plot.flat(row) for row in rows])
    assert line[0].lines["stage2"][0] == (8, pytest.approx(34.65963 + 12.20428 + 1.00147))
    assert [x for x, _ in line[2].lines["stage3"]] == [8, 16384]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"schema": 1, "rows": []}', '{"schema": 99}'])
def test_what_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"other\.json"):
        plot.read(path)


def test_the_command_line_draws_beside_each_file_and_skips_one_without_rows(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    good, bare, bad = (tmp_path / f"{name}.json" for name in ("good", "bare", "bad"))
    good.write_text((AMD / "2026-11-24-40f4de1ca3-checkpoint.json").read_text())
    bare.write_text(json.dumps({"schema": 7, "phases": []}))
    bad.write_text("nothing")
    assert plot.main([str(good), str(bare)]) == 0
    out = capsys.readouterr().out
    assert good.with_suffix(".png").exists() and not bare.with_suffix(".png").exists()
    assert "torch.save" in out and f"{bare}: skipped" in out
    assert plot.main([str(bad)]) == 1 and "bad.json" in capsys.readouterr().err
