"""``zero-optim bench memory_walkthrough``: what is counted is what tensors occupy, and what a rank keeps adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from zero_optim.bench import memory_walkthrough
from zero_optim.bench.live_memory import watch
from zero_optim.bench.memory_walkthrough import BATCH, PHASES, Linears, Walk, ways

CPU = torch.device("cpu")
SMALL = Linears(8, 128)


class Holder:
    """Somewhere to leave tensors from one piece of work to the next."""

    tensors: dict[str, Tensor]

    def __init__(self) -> None:
        self.tensors = {}


def test_a_storage_counts_while_anything_needs_it():
    kept = Holder().tensors
    with watch(CPU) as memory:
        assert memory.after(lambda: kept.update(a=torch.zeros(256))) == (1024, 1024)
        assert memory.after(lambda: kept.update(b=kept["a"][4:])) == (1024, 1024), "a view is no memory"
        assert memory.after(lambda: kept.pop("a")) == (1024, 1024), "the view holds it"
        assert memory.after(lambda: torch.zeros(256)) == (1024, 2048), "freed at once"
        assert memory.after(lambda: kept["b"].untyped_storage().resize_(0)) == (0, 1024)


def test_overlapping_storages_count_once():
    kept = Holder().tensors

    def alias() -> None:
        part = kept["a"].untyped_storage()[:512]
        kept["b"] = torch.empty(0).set_(part, 0, (128,), (1,))

    with watch(CPU) as memory:
        memory.after(lambda: kept.update(a=torch.zeros(256)))
        assert memory.after(alias)[0] == 1024
        assert memory.after(lambda: kept.pop("b"))[0] == 1024


def test_what_autograd_alone_holds_counts():
    kept, parameters = Holder().tensors, (64 * 64 + 64) * 4
    with watch(CPU) as memory:
        net, x = nn.Linear(64, 64), torch.ones(32, 64)
        before, _ = memory.after(lambda: None)
        assert before == parameters + x.nbytes
        after, _ = memory.after(lambda: kept.update(y=net(x).exp().sum()))
        assert after - before == 32 * 64 * 4 + 4, "exp keeps its result for backward"
        after, peak = memory.after(lambda: kept["y"].backward())
        assert after - before == parameters + 4 < peak - before


def walk(rank: int, world_size: int, dtype: torch.dtype) -> list[tuple[dict[str, tuple[int, int]], int]]:
    """Of each way the readings, and what the optimizer says that it keeps."""
    walks = []
    for way in ways(dtype):
        with watch(CPU) as memory:
            one = Walk(SMALL, way, dtype, CPU)
            walks.append((one.readings(memory), sum(one._opt.stats()["memory"].values())))
    return walks


def test_what_is_counted_is_what_the_optimizer_says_that_it_keeps():
    dtype = torch.bfloat16
    for walks in run_ranks(2, walk, dtype):
        data = 2 * BATCH * SMALL.width * dtype.itemsize
        whole = SMALL.numel * dtype.itemsize
        for stage, (readings, kept) in enumerate(walks):
            assert tuple(readings) == PHASES
            # On top come the loss, and small tables a row and a slot.
            assert 0 <= readings["step 3"][0] - data - kept < 0.02 * kept + 4096, stage
            assert readings["step 3"][0] == readings["step 1"][0]
            assert all(after <= peak for after, peak in readings.values())
        (_, first), (_, later) = (walks[2][0][phase] for phase in ("backward 1", "backward 3"))
        at_rest = walks[2][0]["data"][0]
        assert first - at_rest > whole > later - at_rest, "gradients wait for the end of the first backward alone"
        assert walks[3][0]["model"][1] < whole, "no rank ever holds the whole model"
        kept_by = [walks[stage][0]["step 3"][0] for stage in memory_walkthrough.STAGES]
        assert kept_by == sorted(kept_by, reverse=True)
        # Bytes a parameter that a split master and 8-bit moments save, with a scale for each row of 128.
        moments = 2 * (3 - 4 / 128)
        saved_by = {"stage3_split": 2, "stage2_small": 2 + moments, "stage3_small": 2 + moments}
        saved_by |= {"stage2_smallest": 3 + moments, "stage3_smallest": 3 + moments}
        for way, (readings, _) in list(zip(ways(dtype), walks, strict=True))[len(kept_by) :]:
            saved = kept_by[way.stage] - readings["step 3"][0]
            assert saved == pytest.approx(saved_by.pop(way.name) * SMALL.numel / 2, rel=0.03), way
        assert saved_by == {}


def call(rank: int, world_size: int, work, args: tuple) -> object:
    return work(*args)


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(bench, draws_again, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        memory_walkthrough, "on_ranks", lambda count, work, *args, device: run_ranks(count, call, work, args)
    )
    monkeypatch.setattr(memory_walkthrough, "MODEL", Linears(4, 64))
    first = bench("memory_walkthrough", "--device", "cpu", "--dtypes", "fp32", "--out", ".")
    assert first.code == 0, first.err
    (file,) = Path().glob("*-memory_walkthrough.json")
    (plot,) = Path().glob("*-memory_walkthrough.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["backend"], row["phase"]) for row in rows] == [(f"stage{s}", p) for s in range(4) for p in PHASES]
    assert all((row["ranks"], row["dtype"], row["numel"]) == (2, "fp32", Linears(4, 64).numel) for row in rows)
    assert "bytes a parameter" in first.out
    draws_again(first, file, plot)


def test_the_rank_that_has_most_counts_in_every_phase():
    assert memory_walkthrough.most([{"model": (1, 5)}, {"model": (3, 4)}]) == {"model": (3, 5)}
