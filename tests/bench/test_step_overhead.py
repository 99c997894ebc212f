"""``zero-optim bench step_overhead``: what a parameter costs. Its optimizers train alike, its rows add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from zero_optim.bench import step_overhead
from zero_optim.bench.rows.op import OVERHEAD
from zero_optim.bench.step_overhead import (
    ALONE,
    DDP,
    DTYPES,
    FOREACH,
    FUSED,
    LAPS,
    MAKERS,
    OPS,
    OURS,
    Loop,
    Products,
    measure,
    time_on_rank,
)
from zero_optim.bench.timing import HostClock, TimedRounds

CPU = torch.device("cpu")


def _make(name: str, parameters: int, numel: int, dtype: torch.dtype = torch.float32) -> tuple[Loop, Products]:
    model = Products(parameters, numel, dtype, CPU)
    return MAKERS[name](model), model


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_the_optimizers_train_alike(dtype: torch.dtype):
    trainings = {name: _make(name, 6, 200, dtype) for name in ALONE}
    start = [parameter.detach().clone() for parameter in trainings[FUSED][1].weights]
    for training, model in trainings.values():
        for _ in range(3):
            for lap in training.job:
                lap()
        assert all(parameter.grad is None for parameter in model.parameters())
    fused = list(trainings[FUSED][1].weights)
    for name in (OURS, FOREACH):
        tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
        torch.testing.assert_close(list(trainings[name][1].weights), fused, **tolerance)
    ours = zip(trainings[OURS][1].weights, start, strict=True)
    assert all((new != old).any() for new, old in ours) or dtype == torch.bfloat16, "3 steps of 1e-5 are lost in bf16"


def test_every_parameter_has_a_gradient_of_its_own():
    training, model = _make(FUSED, 3, 50)
    training.forward()
    training.backward()
    assert [p.grad.tolist() for p in model.weights] == [factor.tolist() for factor in model.factors]
    assert len({p.grad.untyped_storage().data_ptr() for p in model.weights}) == 3


class LapClock(HostClock):
    """A lap takes as many milliseconds as its optimizer has parameters, times the place of the lap."""

    def __init__(self) -> None:
        self.jobs: list[int] = []

    def time(self, job):
        count = job[0].__self__._count
        self.jobs.append(count)
        for lap in job:
            lap()
        return lambda: [count * place for place in (1.0, 2.0, 3.0, 4.0)]


def test_what_the_rows_hold():
    clock = LapClock()
    rows = measure(CPU, 1000, ("fp32", "bf16"), (1,), clock, TimedRounds.exactly(2), counts=(10, 4))
    assert sorted(set(clock.jobs)) == [4, 10] and len(clock.jobs) == 2 * 6 * 4
    assert [(row.op, row.dtype, row.parameters, row.backend) for row in rows] == [
        (op, dtype, count, name) for op in OPS for dtype in ("fp32", "bf16") for count in (10, 4) for name in ALONE
    ]
    by = {(row.op, row.parameters): row for row in rows if row.backend == OURS}
    assert by["backward_overhead", 10].ms == 20.0 and by["backward_overhead", 10].phases is None
    assert by["step_overhead", 10].ms == 30.0
    assert by["loop_overhead", 4].ms == 36.0 and by["loop_overhead", 4].phases == dict(
        zip(LAPS[1:], (8.0, 12.0, 16.0), strict=True)
    )
    assert {(row.numel, row.rounds, row.ranks, row.baseline, row.vs_torch, row.vs[FOREACH]) for row in rows} == {
        (1000, 2, None, FUSED, 1.0, 1.0)
    }


def test_on_two_ranks_torch_is_ddp(monkeypatch):
    asked = []

    def laps_of(ms: float) -> dict[str, list[dict[str, float]]]:
        return {f"{name} {count}": [dict.fromkeys(LAPS, ms * count)] * 2 for name in (OURS, DDP) for count in (10, 4)}

    def on_ranks(world_size, work, *args):
        asked.append((world_size, work, *args))
        return [laps_of(1.0), laps_of(2.0)]

    monkeypatch.setattr(step_overhead, "on_ranks", on_ranks)
    rows = measure(CPU, 1000, ("fp32",), (2,), LapClock(), TimedRounds.exactly(2), counts=(10, 4))
    assert asked == [(2, time_on_rank, 1000, "fp32", (10, 4), TimedRounds.exactly(2))]
    assert {(row.ranks, row.backend, row.baseline, *row.vs) for row in rows} == {(2, OURS, DDP), (2, DDP, DDP)}
    assert {row.ms for row in rows if (row.op, row.parameters) == ("step_overhead", 10)} == {20.0}, "the slower rank's"


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(bench, draws_again, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(step_overhead.measure, "__defaults__", ((40, 5),))
    first = bench("step_overhead", "--numel", "4000", "--rounds", "2", "--dtypes", "bf16", "--out", ".")
    assert first.code == 0, first.err
    (file,) = Path().glob("*.json")
    (plot,) = Path().glob("*.png")
    assert file.stem.endswith("-step_overhead") and plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(file.read_text())
    assert record["baselines"] == {} and len(record["rows"]) == 18 + 12
    for row in record["rows"]:
        same = {
            r["backend"]: r["ms"]
            for r in record["rows"]
            if all(r[key] == row[key] for key in ("op", "parameters", "ranks"))
        }
        assert row["vs_torch"] == pytest.approx(same[row["baseline"]] / row["ms"], abs=1e-3)
        if row["ranks"] is None:
            assert row["vs"] == {FOREACH: pytest.approx(same[FOREACH] / row["ms"], abs=1e-3)}
        assert row["p20"] <= row["ms"] <= row["p80"] and row["bytes"] is None
    assert "vs fused" in first.out and "bf16 ours, 40 parameters, ms: backward" in first.out
    assert "backward_overhead, 2 ranks" in first.out and "vs ddp" in first.out
    draws_again(first, file, plot)


def test_bars_are_as_long_as_the_times():
    plot = pytest.importorskip("zero_optim.drawing.plot", exc_type=ImportError)
    from matplotlib.figure import Figure

    rows = [
        {"op": "step_overhead", "backend": name, "dtype": "bf16", "numel": 40, "parameters": count, "vs_torch": 1.0,
         "ms": ms, "p20": ms - 1, "p80": ms + 2}
        for count, times in ((20, (3.0, 5.0)), (2, (2.0, 1.5)))
        for name, ms in zip(("ours", "fused"), times, strict=True)
    ]  # fmt: skip
    ((bars,),) = OVERHEAD.sheet(rows).grid
    axes = Figure().subplots()
    plot.draw_panel(bars, axes)
    assert [bar.get_width() for bar in axes.patches] == [3.0, 5.0, 2.0, 1.5]
    heights = [bar.get_y() for bar in axes.patches]
    assert heights == sorted(heights) and heights[2] - heights[1] > heights[1] - heights[0]
    texts = {text.get_text() for text in axes.texts}
    assert {"20 parameters, bf16, 1 rank", "3.000", "1.500", "ms", "vs fused", "1.00×"} <= texts
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours", "fused", "ours", "fused"]
    whiskers = [segment[:, 0].tolist() for segment in axes.containers[1].lines[2][0].get_segments()]
    assert whiskers == [[2.0, 5.0], [4.0, 7.0], [1.0, 4.0], [0.5, 3.5]]
