"""``zero-optim bench step_overhead``: what a parameter costs. Its optimizers train alike, its rows add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from zero_optim.bench import step_overhead
from zero_optim.bench.step_overhead import FOREACH, FUSED, LAPS, MAKERS, OURS, Training, measure
from zero_optim.bench.timing import HostClock, Rounds

CPU = torch.device("cpu")


def test_the_optimizers_train_alike():
    trainings = {name: Training(make, 6, 200, CPU) for name, make in MAKERS.items()}
    start = [parameter.detach().clone() for parameter in trainings[FUSED].parameters]
    for training in trainings.values():
        for _ in range(3):
            for lap in training.job:
                lap()
        assert all(parameter.grad is None for parameter in training.parameters)
    for name in (OURS, FOREACH):
        torch.testing.assert_close(trainings[name].parameters, trainings[FUSED].parameters, rtol=1e-6, atol=1e-7)
    assert all((new - old).abs().min() > 0 for new, old in zip(trainings[OURS].parameters, start, strict=True))


def test_every_parameter_has_a_gradient_of_its_own():
    training = Training(MAKERS[FUSED], 3, 50, CPU)
    training.backward()
    assert [p.grad.tolist() for p in training.parameters] == [factor.tolist() for factor in training._factors]
    assert len({p.grad.data_ptr() for p in training.parameters}) == 3


class LapClock(HostClock):
    """A lap takes as many milliseconds as its optimizer has parameters, times the place of the lap."""

    def __init__(self) -> None:
        self.jobs: list[int] = []

    def time(self, job):
        training = job[0].__self__
        self.jobs.append(len(training.parameters))
        for lap in job:
            lap()
        return lambda: [len(training.parameters) * place for place in (1.0, 2.0, 3.0)]


def test_what_the_rows_hold():
    clock = LapClock()
    rows = measure(CPU, 1000, clock, Rounds.exactly(2), counts=(10, 4))
    assert sorted(set(clock.jobs)) == [4, 10] and len(clock.jobs) == 6 * 4
    assert [(row.op, row.parameters, row.backend) for row in rows] == [
        (op, count, name) for op in ("step_overhead", "loop_overhead") for count in (10, 4) for name in MAKERS
    ]
    by = {(row.op, row.parameters): row for row in rows if row.backend == OURS}
    assert by["step_overhead", 10].ms == 20.0 and by["step_overhead", 10].phases is None
    assert by["loop_overhead", 4].ms == 24.0 and by["loop_overhead", 4].phases == dict(
        zip(LAPS, (4.0, 8.0, 12.0), strict=True)
    )
    assert {(row.dtype, row.numel, row.rounds, row.vs_torch, row.vs[FOREACH]) for row in rows} == {
        ("fp32", 1000, 2, 1.0, 1.0)
    }


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(bench, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(step_overhead, "MANY", 40)
    monkeypatch.setattr(step_overhead.measure, "__defaults__", ((40, 5),))
    first = bench("step_overhead", "--numel", "4000", "--rounds", "2", "--out", ".")
    assert first.code == 0, first.err
    (file,) = Path().glob("*.json")
    (plot,) = Path().glob("*.png")
    assert file.stem.endswith("-step_overhead") and plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(file.read_text())
    assert record["baselines"] == {} and len(record["rows"]) == 12
    for row in record["rows"]:
        same = {r["backend"]: r for r in record["rows"] if (r["op"], r["parameters"]) == (row["op"], row["parameters"])}
        assert row["vs_torch"] == pytest.approx(same[FUSED]["ms"] / row["ms"], abs=1e-3)
        assert row["vs"] == {FOREACH: pytest.approx(same[FOREACH]["ms"] / row["ms"], abs=1e-3)}
        assert row["p20"] <= row["ms"] <= row["p80"] and row["bytes"] is None
    assert "vs fused" in first.out and "fp32 ours, 40 parameters, ms: backward" in first.out
    plot.unlink()
    again = bench("--redraw", file)
    assert again.code == 0 and plot.exists()
    assert again.out.splitlines()[:-1] == first.out.splitlines()[:-2]


def test_bars_are_as_long_as_the_times():
    bars = pytest.importorskip("zero_optim.bench.bars", exc_type=ImportError)
    from matplotlib.figure import Figure

    rows = [
        {"backend": name, "ms": ms, "p20": ms - 1, "p80": ms + 2, "parameters": count}
        for count, times in ((20, (3.0, 5.0)), (2, (2.0, 1.5)))
        for name, ms in zip(("ours", "fused"), times, strict=True)
    ]
    panel = bars.Panel("title", "ms", rows, lambda r: r["ms"], lambda r: (r["p20"], r["p80"]),
                       {"ms": lambda r: str(r["ms"])}, lambda r: f"{r['parameters']} parameters")  # fmt: skip
    axes = Figure().subplots()
    bars.draw_panel(panel, axes)
    assert [bar.get_width() for bar in axes.patches] == [3.0, 5.0, 2.0, 1.5]
    heights = [bar.get_y() for bar in axes.patches]
    assert heights == sorted(heights) and heights[2] - heights[1] > heights[1] - heights[0]
    assert {"20 parameters", "2 parameters", "3.0", "1.5"} <= {text.get_text() for text in axes.texts}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours", "fused", "ours", "fused"]
