"""State in small forms on two ranks goes to fp32 on three at another stage, and back, as docs/ops.md writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from checkpoint_files import read_contents, read_tensors
from harness import run_ranks
from oracle import sqrt_rounded
from sharded_cases import Given, GivenNet
from torch import Tensor
from training_cases import make_gradients
from zero_optim import checkpoint, rules

from zero_kernels import ROW

RUNS = (((24, 40), (300,), (30, 8)), ((5,), (3, 12, 20)), ((36, 30), (1,)))
SHAPES = [shape for run in RUNS for shape in run]
AVERAGES = {"ema_decay": 0.9}
SMALL = {"master": "split8", "state_dtype": "int8", "ema_dtype": "bf16_stochastic"}
LARGER = {"master": "split", "state_dtype": "bf16_stochastic", "ema_dtype": "bf16_stochastic"}
Tensors = dict[tuple[str, str], Tensor]
"""By kind and name."""


# -- the forms, written out --------------------------------------------------------------------------------------------


def rows(values: Tensor) -> Tensor:
    """[rows, 128], with zeros behind the last element."""
    return torch.nn.functional.pad(values.flatten(), (0, -values.numel() % ROW)).view(-1, ROW)


def largest(magnitudes: Tensor, least: float) -> Tensor:
    """[rows, 1]"""
    scale = magnitudes.amax(1, keepdim=True)
    return torch.where(scale < least, 0.0, scale)


def in_8_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of either sign. Where the scale is 0 so is all of the row."""
    values = rows(values)
    scale = largest(values.abs(), 2.0**-100)
    x = values / scale.masked_fill(scale == 0, 1)
    return torch.where(scale == 0, 0.0, (127 * ((x + x) / (1 + x.abs()))).round()), scale


def of_8_bits(stored: Tensor, scale: Tensor) -> Tensor:
    y = stored.float() / 127
    return y / (2 - y.abs()) * scale


def as_roots(values: Tensor) -> tuple[Tensor, Tensor]:
    roots = sqrt_rounded(rows(values))
    scale = largest(roots, 2.0**-63)
    stored = (255 * (roots / scale.masked_fill(scale == 0, 1))).round()
    stored = torch.where((stored == 0) & (roots > 0), 1.0, stored)
    return torch.where(scale == 0, 0.0, stored), scale


def of_roots(stored: Tensor, scale: Tensor) -> Tensor:
    r = stored.float() / 255 * scale
    return r * r


def low_half(master: Tensor) -> Tensor:
    """What its bits are above or below those of its parameter, int64."""
    return master.view(torch.int32).long() - (master.bfloat16().view(torch.int16).long() << 16)


SCALED = {"int8": (in_8_bits, of_8_bits), "root8": (as_roots, of_roots)}
LOW = {"low": (1, 32767), "low8": (256, 127)}
"""By what the low half is divided, and the largest number that is stored."""


def encoded(values: Tensors, form: Mapping[str, str]) -> Tensors:
    """What is stored of ``values``, of which averages and all else are fp32: flat tensors."""
    found: Tensors = {}
    for (kind, name), value in values.items():
        if kind == "parameter":
            found[kind, name] = value.flatten()
        elif kind == "master":
            word = {"split": "low", "split8": "low8"}[form["master"]]
            unit, most = LOW[word]
            found[f"master_{word}", name] = (low_half(value.flatten()) / unit).round().clamp(-most, most)
        elif kind == "ema" or form["state_dtype"] != "int8":
            found[f"{kind}_bf16", name] = value.flatten().bfloat16()
        else:
            word = "root8" if kind == "exp_avg_sq" else "int8"
            stored, scale = SCALED[word][0](value)
            found[f"{kind}_{word}", name] = stored.flatten()[: value.numel()]
            found[f"{kind}_scale", name] = scale.flatten()
    return found


def decoded(stored: Tensors) -> Tensors:
    """The values, fp32, that it stands for: flat tensors."""
    found: Tensors = {}
    for (kind, name), value in stored.items():
        base, _, word = kind.rpartition("_")
        if kind == "parameter":
            found[kind, name] = value.flatten()
        elif word in LOW:
            high = stored["parameter", name].flatten().view(torch.int16).long() << 16
            bits = high + value.flatten().long() * LOW[word][0]
            found[base, name] = bits.to(torch.int32).view(torch.float32)
        elif word == "bf16":
            found[base, name] = value.flatten().float()
        elif word in SCALED:
            scale = stored[f"{base}_scale", name].view(-1, 1)
            found[base, name] = SCALED[word][1](rows(value), scale).flatten()[: value.numel()]
        elif word != "scale":
            found[kind, name] = value.flatten()
    return found


def differing(found: Tensors, wanted: Tensors) -> list[tuple[str, str]]:
    assert found.keys() == wanted.keys()
    flat = [(key, value.flatten().double(), wanted[key].flatten().double()) for key, value in found.items()]
    return [key for key, one, other in flat if not torch.equal(one, other)]


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
    if loaded is not None and saved is not None:
        checkpoint.save(f"{saved}-at-once", model, opt, step=steps.start)
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
    """Widened exactly, and rounded as the form rounds, to nearest even; what was rounded before stays."""
    small, wide, at_once = tmp_path / "small", tmp_path / "wide", tmp_path / "wide-at-once"
    begun = run_ranks(2, job, 2, muon, form, None, range(3), small)[0]
    stored = read(small)
    kinds = {kind for kind, _ in stored}
    assert kinds.isdisjoint({"master", "exp_avg", "exp_avg_sq", "momentum_buffer", "ema"}) and len(kinds) > 4
    assert differing(begun, decoded(stored)) == []
    for seen in run_ranks(3, job, 3, muon, {}, small, range(3, 5), wide):
        assert differing(seen, decoded(stored)) == []
    fine = read(wide)
    assert {kind for kind, _ in fine} == {kind for kind, _ in begun}
    wanted = encoded(fine, form)
    again, back = tmp_path / "again", tmp_path / "back"
    for seen in run_ranks(2, job, 2, muon, form, wide, range(5, 5), again):
        assert differing(seen, decoded(wanted)) == []
    assert differing(read(again), wanted) == []
    run_ranks(2, job, 2, muon, form, at_once, range(3, 3), back)
    assert differing(read(back), stored) == []
    assert counts(small) == counts(at_once) == counts(back) == dict.fromkeys(counts(wide), 3)
    assert counts(wide) == counts(again) == dict.fromkeys(counts(small), 5)
    assert {kind for kind, _ in differing(wanted, stored)} == kinds, "two steps have changed all kinds of state"
