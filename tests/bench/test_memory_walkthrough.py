"""``memory_walkthrough.py``: what is counted is what tensors occupy."""

from __future__ import annotations

import memory_walkthrough
import pytest
import torch
from counted_bytes import watch
from memory_walkthrough import PHASES
from pooled_ranks import on_pool
from torch import nn

CPU = torch.device("cpu")


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
