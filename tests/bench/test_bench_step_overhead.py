"""``bench_step_overhead.py``: its optimizers train alike, and its rows add up."""

from __future__ import annotations

import bench_step_overhead
import pytest
import torch
from bench_step_overhead import LOOPS, OPS, Loop, Products, rows_of, step
from pooled_ranks import on_pool

ON_ONE_RANK = ("ours", "fused")


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
    torch.testing.assert_close(list(loops["ours"][1].weights), list(loops["fused"][1].weights), **tolerance)
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
    laps = {f"{n} {count}": [[factor * count * lap for lap in (1, 2, 3, 4)]] * 2 for n in names for count in counts}
    return laps | {f"{n} {count} begun": [[factor, 2.0, 1.0, 1.0, 1.0]] for n in names for count in counts}


def test_the_rows_of_one_rank(monkeypatch):
    monkeypatch.setattr(bench_step_overhead, "on_ranks", lambda *_: [laps_of(ON_ONE_RANK, (10, 4))])
    rows = step(1000, "bf16", (10, 4), 1, 2)
    keys = [(row["parameters"], row["op"], row["backend"]) for row in rows]
    assert keys == [(count, op, name) for count in (10, 4) for op in ("construct", *OPS) for name in ON_ONE_RANK]
    by = {(row["op"], row["parameters"]): row for row in rows if row["backend"] == "ours"}
    assert (by["backward_overhead", 10]["ms"], by["step_overhead", 10]["ms"]) == (20.0, 30.0)
    assert by["loop_overhead", 4]["ms"] == 36.0 and by["construct", 4]["ms"] == 6.0
    assert by["loop_overhead", 4]["phases"] == {"backward": 8.0, "step": 12.0, "zero_grad": 16.0}
    same = {(row["numel"], row["ranks"], row["baseline"], row["vs_torch"]) for row in rows}
    assert same == {(1000, 1, "fused", 1.0)}


def test_the_slower_of_two_ranks_counts(monkeypatch):
    both = [laps_of(("ours", "ddp"), (10,), factor) for factor in (1.0, 2.0)]
    monkeypatch.setattr(bench_step_overhead, "on_ranks", lambda *_: both)
    rows = step(1000, "fp32", (10,), 2, 2)
    assert {(row["backend"], row["baseline"]) for row in rows} == {("ours", "ddp"), ("ddp", "ddp")}
    assert {row["ms"] for row in rows if row["op"] == "step_overhead"} == {60.0}


def test_a_ratio_is_the_baselines_time_over_its_own():
    slow, fast = rows_of("construct", "fp32", 100, 8, 2, {"fsdp2": [4.0, 4.0], "ours": [1.0, 1.0]}, "fsdp2")
    assert (slow["vs_torch"], fast["vs_torch"], fast["us_per_parameter"], fast["numel"]) == (1.0, 4.0, 10.0, 800)


def test_a_run(ran, monkeypatch):
    monkeypatch.setattr(bench_step_overhead, "NUMEL", 400)
    monkeypatch.setattr(bench_step_overhead, "on_ranks", on_pool)
    flags = ["--parameters", "8", "2", "--ranks", "1", "--dtype", "bf16", "--rounds", "1"]
    _, rows = ran(bench_step_overhead.main, *flags)
    assert len(rows) == (1 + len(OPS)) * 2 * len(ON_ONE_RANK) and {row["numel"] for row in rows} == {400}
