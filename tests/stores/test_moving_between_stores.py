"""State does not depend on the store: what one has, any other takes over, by state dict, full state and checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from cells import slow
from compare import bits, first_difference
from harness import run_ranks
from sharded_cases import Given, GivenNet, full_state
from training_cases import make_gradients
from zero_optim import checkpoint

RUNS = (((17, 9), (300,), (1,)), ((5, 3, 2), (128,), (0,)), ((40, 25), (2, 1)), ((31,), (257,)))
SHAPES = [shape for run in RUNS for shape in run]
STORES: tuple[dict[str, Any], ...] = (
    {},
    {"state_offload": "paged", "device_budget": 0},
    {"state_offload": "cpu"},
    {"state_offload": "nvme"},
)
WAYS = ("state_dict", "full_state_dict", "checkpoint", "checkpoint in the background")


def _make(options: dict[str, Any], folder: str, stage: int) -> tuple[GivenNet, Any]:
    model = GivenNet(RUNS, torch.bfloat16)
    given = dict(options)
    if given.get("state_offload") == "nvme":
        given["state_offload"] = f"nvme:{folder}"
    if stage == 3:
        zero_optim.shard_module(model, (Given,))
        return model, zero_optim.ShardedAdamW(model.named_parameters(), lr=0.02, **given)
    return model, zero_optim.ShardedAdamW(model.named_parameters(), lr=0.02, stage=stage, bucket_cap_mb=0.002, **given)


def _train(model: GivenNet, opt: Any, rank: int, steps: range) -> None:
    like = [torch.empty(shape, dtype=torch.bfloat16) for shape in SHAPES]
    for step in steps:
        model(make_gradients(like, rank, step)).backward()
        opt.step()
        opt.zero_grad()


def _pairs(turn: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A half of all pairs of stores, with every store on either side, and every way; of the other turn the other half.
    What all are compared with comes first."""
    every = [*itertools.product(STORES, STORES)]
    half = [pair for number, pair in enumerate(every) if (number // 2 + number // 4) % 2 == turn]
    return half if every[0] in half else [every[0], *half]


def _moved(rank: int, world_size: int, stage: int, turn: int, folder: str) -> dict[str, str | None]:
    """By pair of stores and way, where the state differs from that of a run that did not move."""
    disk = f"{folder}/disk"
    ends: list[Any] = []
    wrong: dict[str, str | None] = {}
    for number, (source, target) in enumerate(_pairs(turn)):
        way = WAYS[(STORES.index(source) + STORES.index(target)) % len(WAYS)]
        model, opt = _make(source, disk, stage)
        _train(model, opt, rank, range(3))
        if way == "state_dict":
            saved = opt.state_dict()
        elif way == "full_state_dict":
            saved = zero_optim.full_state_dict(opt)
        else:
            checkpoint.save(f"{folder}/{number}", model, opt, step=3, background=way.endswith("background"))
            checkpoint.wait()
        with zero_optim.gather_parameters(model):
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        other, moved = _make(target, disk, stage)
        if "checkpoint" not in way:
            with zero_optim.gather_parameters(other, writeback=True), torch.no_grad():
                for name, value in other.named_parameters():
                    value.copy_(weights[name])
        if way == "state_dict":
            moved.load_state_dict(saved)
        elif way == "full_state_dict":
            zero_optim.load_full_state_dict(moved, saved)
        else:
            checkpoint.load(f"{folder}/{number}", other, moved)
        opt.close()
        _train(other, moved, rank, range(3, 5))
        ends.append(full_state(moved))
        wrong[f"{source} -> {target} by {way}"] = first_difference(ends[0], ends[-1], bits)
        moved.close()
    return wrong


# Every pair of stores is there once in ``make test``: a half at stage 2, the other at stage 3.
@pytest.mark.parametrize(
    ("stage", "turn"), [(2, 0), (3, 1), pytest.param(1, 1, marks=slow), pytest.param(3, 0, marks=slow)]
)
def test_every_store_takes_over_from_every_other(stage: int, turn: int, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for wrong in run_ranks(2, _moved, stage, turn, str(tmp_path)):
        assert len(wrong) == 8 + turn
        assert not {pair: text for pair, text in wrong.items() if text}
    assert not list((tmp_path / "disk").iterdir())
