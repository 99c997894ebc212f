"""``bench_step_overhead.py``: its optimizers train alike, its rows add up, and each call is timed in its place."""

from __future__ import annotations

import bench_step_overhead
import pytest
import torch
from bench_step_overhead import CALLS, LOOPS, ON_ONE_RANK, OPS, Loop, Products, rows_of, step
from recorded import record_of


def make(name: str, parameters: int, numel: int, dtype: torch.dtype = torch.float32) -> tuple[Loop, Products]:
    model = Products(parameters, numel, dtype)
    return LOOPS[name](model), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizers_train_alike(dtype: torch.dtype):
    loops = {name: make(name, 6, 200, dtype) for name in ON_ONE_RANK}
    for loop, model in loops.values():
        for _ in range(3):
            for lap in loop.job:
                lap()
        assert all(parameter.grad is None for parameter in model.parameters())
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
    for name in ("ours", "foreach"):
        torch.testing.assert_close(list(loops[name][1].weights), list(loops["fused"][1].weights), **tolerance)
    if dtype == torch.float32:
        assert (loops["ours"][1].weights[0] != Products(6, 200, dtype).weights[0]).any()


def test_every_parameter_has_a_gradient_of_its_own():
    loop, model = make("fused", 3, 50)
    loop.forward()
    loop.backward()
    assert [p.grad.tolist() for p in model.weights] == [factor.tolist() for factor in model.factors]
    assert len({p.grad.untyped_storage().data_ptr() for p in model.weights}) == 3


def laps_of(names: tuple[str, ...], counts: tuple[int, ...], factor: float = 1.0) -> dict[str, list[list[float]]]:
    """A lap takes as many milliseconds as there are parameters, times the place of the lap."""
    return {f"{n} {count}": [[factor * count * lap for lap in (1, 2, 3, 4)]] * 2 for n in names for count in counts}


def test_the_rows_of_one_rank(monkeypatch):
    monkeypatch.setattr(bench_step_overhead, "time_loops", lambda names, *_: laps_of(names, (10, 4)))
    rows = step(1000, "bf16", (10, 4), 1, 2)
    keys = [(row["op"], row["parameters"], row["backend"]) for row in rows]
    assert keys == [(op, count, name) for op in OPS for count in (10, 4) for name in ON_ONE_RANK]
    by = {(row["op"], row["parameters"]): row for row in rows if row["backend"] == "ours"}
    assert (by["backward_overhead", 10]["ms"], by["step_overhead", 10]["ms"]) == (20.0, 30.0)
    assert by["loop_overhead", 4]["ms"] == 36.0
    assert by["loop_overhead", 4]["phases"] == {"backward": 8.0, "step": 12.0, "zero_grad": 16.0}
    same = {(row["numel"], row["rounds"], row["ranks"], row["baseline"], row["vs_torch"]) for row in rows}
    assert same == {(1000, 2, 1, "fused", 1.0)}


def test_the_slower_of_two_ranks_counts(monkeypatch):
    both = [laps_of(("ours", "ddp"), (10,), factor) for factor in (1.0, 2.0)]
    monkeypatch.setattr(bench_step_overhead, "on_ranks", lambda *_: both)
    rows = step(1000, "fp32", (10,), 2, 2)
    assert {(row["backend"], row["baseline"]) for row in rows} == {("ours", "ddp"), ("ddp", "ddp")}
    assert {row["ms"] for row in rows if row["op"] == "step_overhead"} == {60.0}


def test_a_ratio_is_the_baselines_time_over_its_own():
    slow, fast = rows_of("save", "fp32", 100, 8, 2, {"fsdp2": [4.0, 4.0], "ours": [1.0, 1.0]}, "fsdp2")
    assert (slow["vs_torch"], fast["vs_torch"], fast["us_per_parameter"], fast["numel"]) == (1.0, 4.0, 10.0, 800)


def test_each_call_is_timed(monkeypatch, tmp_path):
    """A step is made before its state is saved and loaded."""
    rows = record_of(
        monkeypatch, tmp_path, bench_step_overhead, "calls", "--parameters", "10", "--ranks", "1", "--rounds", "1"
    )["rows"]
    names = {call: [row["backend"] for row in rows if row["op"] == call] for call in CALLS}
    assert all(of_call == ["ours", "ddp", "fsdp2"] for of_call in names.values())
    assert all(row["us_per_parameter"] == pytest.approx(row["ms"] * 100, abs=0.01) and row["ms"] > 0 for row in rows)


def test_few_parameters_leave_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_step_overhead, "NUMEL", 400)
    flags = ["--parameters", "8", "2", "--ranks", "1", "--dtype", "bf16", "--rounds", "1"]
    rows = record_of(monkeypatch, tmp_path, bench_step_overhead, *flags)["rows"]
    assert len(rows) == len(OPS) * 2 * len(ON_ONE_RANK) and {row["numel"] for row in rows} == {400}
