"""Ranks that have the same matrices share the work of Muon, with the bits of ranks that repeat it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import grid_cases
import pytest
import torch
import zero_optim
from cells import slow_after
from harness import run_ranks
from torch import Tensor, nn
from training_cases import error_of
from zero_optim import ParameterError, RankMismatchError, ShardedMuon, rules
from zero_optim.rules import homes, newton_schulz

STEPS, OVERFLOW = 3, 1
WIDTHS = (24, 40, 64, 20, 48, 32, 40, 56)
KIND = homes.REPLICA_ALL_REDUCE


class Net(nn.Module):
    """Matrices of several shapes, some of them stacked, and biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width * 2) for width in WIDTHS)
        self.stack = nn.Parameter(torch.randn(5, 24, 20) / 5)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        total = sum(block(x[:, : block.in_features]).tanh().mean() for block in self.blocks)
        return total + (x[:, :24] @ self.stack).square().mean()


def make(stage: int, mesh: Any, dtype: torch.dtype, **options: Any) -> tuple[Net, ShardedMuon]:
    model = Net(dtype)
    if stage == 3:
        over = {"state_over": options.pop("state_over")} if "state_over" in options else {}
        zero_optim.shard_module(model, (nn.Linear,), mesh=mesh, **over)
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    biases = [(name, p) for name, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": biases, "rule": rules.AdamW(lr=1e-2)}]
    given = {"lr": 0.02, "stage": stage, "bucket_cap_mb": 0.02, "max_grad_norm": 0.5, **options}
    return model, ShardedMuon(groups, **given, **({} if stage == 3 else {"mesh": mesh}))


def train(model: Net, opt: ShardedMuon, rank: int) -> None:
    for step in range(STEPS):
        x = torch.randn(9, max(WIDTHS), generator=torch.Generator().manual_seed(step * 10 + rank))
        factor = math.inf if step == OVERFLOW and rank == 1 else 1.0
        (model(x.to(next(model.parameters()).dtype)) * factor).backward()
        opt.step()
        opt.zero_grad()


@contextmanager
def seeing_iterations() -> Iterator[list[tuple[int, int]]]:
    """Within it (rows, columns) of each matrix that this rank makes orthogonal are noted."""
    made: list[tuple[int, int]] = []
    orthogonalized = newton_schulz.orthogonalized

    def noted(matrix: Tensor, *options: Any) -> Tensor:
        made.extend([tuple(matrix.shape[-2:])] * math.prod(matrix.shape[:-2]))
        return orthogonalized(matrix, *options)

    with mock.patch.object(newton_schulz, "orthogonalized", noted):
        yield made


Run = tuple[dict[str, Tensor], list[tuple[int, int]], dict[str, dict[str, int]]]
"""What one rank has after all: parameters and state, whole; what it has made orthogonal; what it has sent."""


def _run(rank: int, world_size: int, stage: int, shards: int, dtype: torch.dtype, options: dict[str, Any]) -> Run:
    """``shards``: ranks that share, at stages 1 to 3."""
    mesh = None if stage == 0 else grid_cases.make_mesh(world_size // shards, shards)
    model, opt = make(stage, mesh, dtype, **options)
    with seeing_iterations() as made:
        train(model, opt, rank)
    sent = opt.stats()["collectives"]
    state = zero_optim.full_state_dict(opt, rank=None)["state"]
    found = {f"{number} {name}": value for number, of in state.items() for name, value in of.items()}
    with zero_optim.gather_parameters(model):
        found |= {name: p.detach().clone() for name, p in model.named_parameters()}
    opt.close()
    return found, made, sent


Alike = tuple[bool, int, int]


def _alike(rank: int, world_size: int, stage: int, shards: int, dtype: torch.dtype, options: dict[str, Any]) -> Alike:
    """Whether ranks that share the work have the bits of those that repeat it, and how many matrices a rank makes
    orthogonal in the two ways. A batch has two parameters for a rank, which replicas share."""
    with mock.patch.multiple(homes, JOINED_ON_A_PROCESSOR=1, PARAMETERS_A_RANK=2):
        shared, made, *_ = _run(rank, world_size, stage, shards, dtype, options)
    repeated, of_all, *_ = _run(rank, world_size, stage, shards, dtype, {**options, "ns_replicas": "repeat"})
    assert shared.keys() == repeated.keys()
    return all(torch.equal(value, repeated[name]) for name, value in shared.items()), len(made), len(of_all)


def _check_alike(found: list[Alike], replicas: int) -> None:
    assert all(alike for alike, *_ in found)
    assert sum(made for _, made, _ in found) * replicas == sum(made for *_, made in found)


CELLS = slow_after(3, [(3, 0, 1), (4, 1, 2), (4, 3, 2), (2, 0, 1), (4, 2, 2), (6, 2, 2)])
every_cell = pytest.mark.parametrize(("ranks", "stage", "shards"), CELLS, ids=lambda value: str(value))


@every_cell
def test_it_has_the_bits_of_ranks_that_repeat_the_work(ranks: int, stage: int, shards: int) -> None:
    dtype = torch.float32 if stage == 1 else torch.bfloat16
    _check_alike(run_ranks(ranks, _alike, stage, shards, dtype, {}), ranks // shards)


@pytest.mark.parametrize("stage", slow_after(1, [3, 1, 2]))
def test_with_state_over_all_one_of_all_ranks_makes_each_matrix(stage: int) -> None:
    """With the bits of replicas. Six ranks: two rows of three, whose shards do not lie in the order of the ranks."""
    hybrid, over_all = (
        run_ranks(6, _run, stage, 3, torch.bfloat16, {"state_over": over, "state_dtype": "int8", "master": "split"})
        for over in ("shard", "all")
    )
    for (found, _, _), (wanted, _, _) in zip(over_all, hybrid, strict=True):
        assert found.keys() == wanted.keys()
        assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []
    made = [matrix for _, of_rank, _ in over_all for matrix in of_rank]
    assert len(made) == STEPS * (len(WIDTHS) + 5), "each once, by all ranks together"
    assert all(of_rank for _, of_rank, _ in over_all)
    assert not any(KIND in sent for _, _, sent in over_all), "replicas divide nothing"


STORED = {
    "state on the host": (3, {"state_offload": "cpu"}),
    "pages": (3, {"state_offload": "paged", "device_budget": 0, "state_dtype": "int8", "master": "split"}),
    "averages, measured": (1, {"ema_decay": 0.9, "telemetry_every": 1}),
}


@pytest.mark.parametrize("name", slow_after(2, ["pages", "averages, measured", "state on the host"]))
def test_wherever_state_is(name: str) -> None:
    stage, options = STORED[name]
    _check_alike(run_ranks(4, _alike, stage, 2, torch.bfloat16, options), 2)


@pytest.mark.parametrize("stage", [0, 2])
def test_what_comes_in_pages_below_stage_3_is_made_by_all(stage: int) -> None:
    """They would come twice."""
    ranks, shards = (4, 2) if stage else (2, 1)
    for _, made, sent in run_ranks(ranks, _run, stage, shards, torch.bfloat16, {"state_offload": "cpu"}):
        assert made and KIND not in sent


@every_cell
def test_each_makes_some_and_tells_the_others(ranks: int, stage: int, shards: int) -> None:
    found = run_ranks(ranks, _run, stage, shards, torch.bfloat16, {})
    replicas = ranks // shards
    matrices = [(2 * width, width) for width in WIDTHS] + [(24, 20)] * 5
    assert sorted(shape for _, made, *_ in found for shape in made) == sorted(matrices * STEPS)
    # All that a rank has, in bf16, goes through the sum.
    numel = sum(rows * columns for rows, columns in matrices)
    assert sum(sent[KIND]["bytes"] for _, _, sent in found) == 2 * numel * replicas * STEPS
    costs = [sum(rules.Muon().cost(shape) for shape in made) for _, made, *_ in found]
    if stage == 0:  # a stack stays together, so the largest of six that follow each other may be alone
        assert max(costs) < sum(costs) * 0.8


def _repeats(rank: int, world_size: int) -> tuple[int, bool]:
    _, made, sent = _run(rank, world_size, 0, 1, torch.bfloat16, {"ns_replicas": "repeat"})
    return len(made), KIND in sent


def test_ranks_that_repeat_the_work_send_nothing() -> None:
    assert run_ranks(2, _repeats) == [((len(WIDTHS) + 5) * STEPS, False)] * 2


def _differ(rank: int, world_size: int) -> tuple[str, str]:
    return error_of(lambda: make(0, None, torch.bfloat16, ns_replicas=("share", "repeat")[rank]))


def test_ranks_that_differ_are_told() -> None:
    for kind, says in run_ranks(2, _differ):
        assert kind == RankMismatchError.__name__ and "ns_replicas" in says, says


def test_another_word_is_refused() -> None:
    with pytest.raises((ParameterError, ValueError), match="ns_replicas must be one of 'share', 'repeat', got 'both'"):
        make(0, None, torch.bfloat16, ns_replicas="both")
