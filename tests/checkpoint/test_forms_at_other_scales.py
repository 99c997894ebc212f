"""State in small forms on two ranks goes to fp32 on three at another stage, and back. ``rules/test_codecs.py`` has the
arithmetic of the forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from checkpoint_files import read_contents, read_tensors
from harness import run_ranks
from sharded_cases import Given, GivenNet
from torch import Tensor
from training_cases import make_gradients
from zero_optim import checkpoint, rules

RUNS = (((24, 40), (300,), (30, 8)), ((5,), (3, 12, 20)), ((36, 30), (1,)))
SHAPES = [shape for run in RUNS for shape in run]
AVERAGES = {"ema_decay": 0.9}
SMALL = {"master": "split8", "state_dtype": "int8"}
LARGER = {"master": "split", "state_dtype": "bf16"}
Tensors = dict[tuple[str, str], Tensor]
"""By kind and name."""


def differing(found: Tensors, wanted: Tensors) -> list[tuple[str, str]]:
    assert found.keys() == wanted.keys()
    return [key for key, value in found.items() if not torch.equal(value.flatten(), wanted[key].flatten())]


# -- jobs --------------------------------------------------------------------------------------------------------------


def job(
    rank: int, world_size: int, stage: int, muon: bool, form: Any, loaded: Any, steps: range, saved: Any
) -> Tensors:
    """Loads, trains and saves. Whole state and parameters as they were loaded, or at the end where nothing was."""
    model = GivenNet(RUNS, torch.bfloat16, seed=0 if loaded is None else 7)
    if stage == 3:
        zero_optim.shard_module(model, (Given,))
    named = [*model.named_parameters()]
    matrices = [entry for entry in named if entry[1].dim() > 1 and entry[1].shape != (30, 8)] if muon else named[:3]
    chosen = {name for name, _ in matrices}
    others = {"params": [entry for entry in named if entry[0] not in chosen]}
    if muon:
        others |= {"rule": rules.AdamW(lr=1e-2)}
    make = zero_optim.ShardedMuon if muon else zero_optim.ShardedAdamW
    opt = make([{"params": matrices}, others], lr=0.01, stage=stage, bucket_cap_mb=0.004, **AVERAGES, **form)
    if loaded is not None:
        checkpoint.load(loaded, model, opt)
    seen = look(model, opt)
    for step in steps:
        model(make_gradients([torch.empty(shape, dtype=torch.bfloat16) for shape in SHAPES], rank, step)).backward()
        opt.step()
        opt.zero_grad()
    if saved is not None:
        checkpoint.save(saved, model, opt, step=steps.stop)
    seen = seen if loaded is not None else look(model, opt)
    opt.close()
    return seen


def look(model: Any, opt: Any) -> Tensors:
    names = [name for group in opt.param_groups for name in group["param_names"]]
    state = zero_optim.full_state_dict(opt, rank=None)["state"]
    seen = {(kind, names[index]): value for index, of in state.items() for kind, value in of.items()}
    seen |= {("parameter", name): whole for name, whole in zero_optim.full_model_state_dict(model, rank=None).items()}
    return {key: value.flatten().clone() for key, value in seen.items() if key[0] != "step"}


def read(folder: Path) -> Tensors:
    (step,) = folder.iterdir()
    return read_tensors(step)


def counts(folder: Path) -> dict[str, int]:
    """Updates by parameter."""
    (step,) = folder.iterdir()
    return {name: count for of in read_contents(step)["optimizers"] for name, count in of["steps"].items()}


@pytest.mark.parametrize(
    ("muon", "form"), [(True, SMALL), (False, LARGER)], ids=["muon and adamw, small", "adamw, larger"]
)
def test_small_forms_on_two_ranks_go_to_fp32_on_three_and_back(tmp_path: Path, muon: bool, form: Any) -> None:
    """Widened exactly: all ranks have the values that were saved. What was rounded before stays: saved again in the
    small form it has the same bits."""
    small, wide, back = tmp_path / "small", tmp_path / "wide", tmp_path / "back"
    begun = run_ranks(2, job, 2, muon, form, None, range(3), small)[0]
    stored = read(small)
    kinds = {kind for kind, _ in stored}
    assert kinds.isdisjoint({"exp_avg", "exp_avg_sq", "momentum_buffer"}) and kinds > {"master", "ema"}
    for seen in run_ranks(3, job, 3, muon, {"master": "fp32"}, small, range(3, 3), wide):
        assert differing(seen, begun) == []
    fine = read(wide)
    assert {kind for kind, _ in fine} == {kind for kind, _ in begun}
    assert differing(fine, begun) == []
    for seen in run_ranks(2, job, 2, muon, form, wide, range(3, 3), back):
        assert differing(seen, begun) == []
    assert differing(read(back), stored) == []
    assert counts(small) == counts(wide) == counts(back) == dict.fromkeys(counts(wide), 3)
