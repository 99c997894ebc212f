"""``bench_muon.py``: the share of the iteration, and what is said of layouts on paper."""

from __future__ import annotations

import bench_muon
import muon_on_paper
import newton_schulz
import pytest
import torch
from bench_scale import fake_ranks
from harness import run_ranks
from muon_on_paper import OnPaper, choices, on_paper
from zero_optim import ShardedMuon
from zero_optim.bench.contenders import DDP_MUON, MUON, MUON_STAGE3, Task
from zero_optim.train.model import GPT, ModelConfig

TASK = Task(ModelConfig(layers=3, hidden=32, heads=2, seq=16), torch.bfloat16, 1)
OF_BLOCK = 32**3 * ((6 * 3 + 11) + 5 * 3 + 2 * (6 * 4 + 11))
"""Multiplications. Queries, keys and values together, up and down are long: polynomials of two, two and one step take
11 of square matrices, and in each X goes in twice. The output takes 3 in each step."""


def iterations(rank: int, world_size: int) -> dict[str, newton_schulz.OfRank]:
    return {name: newton_schulz.on_rank(TASK, name, 2) for name in (MUON, MUON_STAGE3, DDP_MUON)}


def test_what_ranks_multiply_is_what_their_matrices_take():
    """Under DDP each rank has all of them. Ours have them once, and as the layout on paper says."""
    found = run_ranks(2, iterations)
    by_rank = {name: [of_rank[name].multiplications for of_rank in found] for name in found[0]}
    whole = 3 * OF_BLOCK
    assert by_rank[DDP_MUON] == [whole, whole]
    assert sum(by_rank[MUON]) == sum(by_rank[MUON_STAGE3]) == whole
    with torch.device("meta"):
        matrices, _ = ShardedMuon.split(GPT(TASK.config, TASK.dtype))
    on = on_paper([tuple(p.shape) for _, p in reversed(matrices)], 2)
    assert max(by_rank[MUON]) / (whole / 2) == pytest.approx(on.imbalance)
    assert bench_muon.padding(TASK, 2) == on.padding
    assert all(0 < of_rank[name].share < 1 for of_rank in found for name in of_rank)


def test_three_matrices_on_two_ranks_and_on_four():
    three = [(128, 256)] * 3
    padding, imbalance = pytest.approx(1 / 3), pytest.approx(4 / 3)
    one = 5 * (2 * 128**2 * 256 + 128**3)  # multiplications of a matrix
    assert on_paper(three, 2) == OnPaper(2, 1, 4 * 128 * 256, padding, imbalance, 0, 1.5 * 128 * 256, 2 * one)
    assert on_paper(three, 4) == OnPaper(4, 1, 4 * 128 * 256, padding, imbalance, 1, 0.75 * 128 * 256, one)


def test_replicas_share_where_a_message_takes_less_than_it_saves():
    of = OnPaper(2, 1, 0, 0.0, 1.0, 0, numel=1e9, multiplied=10**15)
    # 2 GB go through an all-reduce; half of 2e15 operations takes 2.5 s.
    assert of.pays_from(2) == pytest.approx(2e9 / 2.5)
    assert of.pays_from(64) == pytest.approx(4e9 * 63 / 64 / (2e15 * 0.75 / 400e12))


def test_fewer_ranks_share_where_all_of_them_do_not_fit(monkeypatch):
    four = [(128, 256)] * 4
    assert [found.shards for found in choices(four, 4)] == [4]
    assert [found.shards for found in choices(four, 16)] == [16, 4]
    monkeypatch.setattr(muon_on_paper, "MOST_BYTES", 128 * 256 * 4)  # two matrices in bf16
    assert [found.shards for found in choices(four, 16)] == [16, 2]


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_layout_on_paper_is_the_optimizers(ranks):
    shapes = [(64, 64), (192, 64), (256, 64), (64, 256)] * 8
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    with fake_ranks(ranks):
        optimizer = ShardedMuon(parameters, stage=2)
        layouts = [bucket.layout for bucket in optimizer.engine.reducer.buckets]
        optimizer.close()
    on_paper = muon_on_paper.layouts_of(shapes[::-1], ranks)
    assert [*map(_places, layouts)] == [*map(_places, on_paper)]


def _places(layout):
    return layout.numel, [(slot.offset, slot.numel) for slot in layout.slots]


def test_the_table_has_a_line_for_each_choice():
    lines = muon_on_paper.table({"a model": muon_on_paper.LLAMA_7B}, [8, 128])
    assert lines[2] == "| a model | 8 | 8 | 1 | 13 | 2.8 % | 1.4 | 1.00 | 0 |  |"
    assert [line.split(" | ")[1:4] for line in lines[3:]] == [["128", "128", "1"], ["128", "64", "2"]]
