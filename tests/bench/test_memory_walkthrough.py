"""``memory_walkthrough.py``: what is counted is what tensors occupy, and what a rank keeps adds up."""

from __future__ import annotations

import memory_walkthrough
import pytest
import torch
from counted_bytes import watch
from harness import run_ranks
from memory_walkthrough import BATCH, PHASES, PLAIN, SMALL, Walk
from pooled_ranks import on_pool
from torch import nn

CPU = torch.device("cpu")
LAYERS, WIDTH = 8, 128
NUMEL = LAYERS * WIDTH * (WIDTH + 1)


def test_a_storage_counts_while_anything_needs_it():
    kept: dict[str, torch.Tensor] = {}

    def alias() -> None:
        part = kept["b"].untyped_storage()[:512]
        kept["c"] = torch.empty(0).set_(part, 0, (128,), (1,))

    with watch(CPU) as memory:
        assert memory.after(lambda: kept.update(a=torch.zeros(256))) == (1024, 1024)
        assert memory.after(lambda: kept.update(b=kept["a"][4:])) == (1024, 1024), "a view is no memory"
        assert memory.after(lambda: kept.pop("a")) == (1024, 1024), "the view holds it"
        assert memory.after(lambda: torch.zeros(256)) == (1024, 2048), "freed at once"
        assert memory.after(alias)[0] == 1024, "overlapping storages count once"
        kept.pop("c")
        assert memory.after(lambda: kept["b"].untyped_storage().resize_(0)) == (0, 1024)


def test_what_autograd_alone_holds_counts():
    kept, parameters = {}, (64 * 64 + 64) * 4
    with watch(CPU) as memory:
        net, x = nn.Linear(64, 64), torch.ones(32, 64)
        before, _ = memory.after(lambda: None)
        assert before == parameters + x.nbytes
        after, _ = memory.after(lambda: kept.update(y=net(x).exp().sum()))
        assert after - before == 32 * 64 * 4 + 4, "exp keeps its result for backward"
        after, peak = memory.after(lambda: kept["y"].backward())
        assert after - before == parameters + 4 < peak - before


def walk(rank: int, world_size: int) -> dict[str, tuple[dict[str, tuple[int, int]], int]]:
    """Of each way the readings, and what the optimizer says that it keeps."""
    walks = {}
    for name, options in {**PLAIN, **SMALL}.items():
        with watch(CPU) as memory:
            one = Walk(LAYERS, WIDTH, options, torch.bfloat16, CPU)
            walks[name] = one.readings(memory), sum(one.opt.stats()["memory"].values())
    return walks


@pytest.mark.slow
def test_what_is_counted_is_what_the_optimizer_says_that_it_keeps():
    data, whole = 2 * BATCH * WIDTH * 2, NUMEL * 2
    for walks in run_ranks(2, walk):
        for way in PLAIN:
            readings, kept = walks[way]
            assert tuple(readings) == PHASES
            # on top come the loss, and small tables a row and a slot
            assert 0 <= readings["step 3"][0] - data - kept < 0.02 * kept + 4096, way
            assert readings["step 3"][0] == readings["step 1"][0]
            assert all(after <= peak for after, peak in readings.values())
        readings = walks["stage2"][0]
        first, later, at_rest = readings["backward 1"][1], readings["backward 3"][1], readings["data"][0]
        assert whole > first - at_rest and whole > later - at_rest, "no backward holds all gradients"
        assert walks["stage3"][0]["model"][1] < whole, "no rank ever holds the whole model"
        kept_by = [walks[way][0]["step 3"][0] for way in PLAIN]
        assert kept_by == sorted(kept_by, reverse=True)
        # bytes a parameter that each saves beside a split master and fp32 moments; 8-bit ones have a scale a row of 128
        moments = 2 * (3 - 4 / 128)
        saved_by = {"fp32": -2, "int8": moments, "smallest": 1 + moments}
        for way, options in SMALL.items():
            saved = kept_by[options["stage"]] - walks[way][0]["step 3"][0]
            assert saved == pytest.approx(saved_by[way.split("_")[1]] * NUMEL / 2, rel=0.03), way


@pytest.mark.slow
def test_a_run(ran, monkeypatch):
    monkeypatch.setattr(memory_walkthrough, "on_ranks", on_pool)
    monkeypatch.setattr(memory_walkthrough, "LAYERS", 4)
    monkeypatch.setattr(memory_walkthrough, "WIDTH", 64)
    _, rows = ran(memory_walkthrough.main, "--device", "cpu", "--dtype", "fp32")
    assert [(row["backend"], row["phase"]) for row in rows] == [(f"stage{s}", p) for s in range(4) for p in PHASES]
    for row in rows:
        assert (row["ranks"], row["dtype"], row["numel"]) == (2, "fp32", 4 * 64 * 65)
        assert row["bytes"] == round(row["after"] / row["numel"], 2) and row["after"] <= row["peak"]
