"""``telemetry()``: the numbers of each parameter against torch's AdamW in one process, at every stage and store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import guards
import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn

KINDS = ("grad_norm", "update_norm", "param_norm", "largest_update", "grad_zeros")
STEPS, MAX_NORM = 3, 0.5
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
Numbers = dict[str, dict[str, float]]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Of several rows, of one, and of a part of one; two units of the middle are dead. One parameter is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 5), nn.Linear(5, 1))
    with torch.no_grad():
        model[0].bias[:2] = -100.0
    model[2].bias.requires_grad_(False)
    return model.to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(7, 13, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x.to(next(model.parameters()).dtype)).float() ** 2).mean()


def expected(world_size: int) -> list[Numbers]:
    """Of each step, by name: from gradients and parameters of one process, in float64."""
    model = make_model()
    names = dict(model.named_parameters())
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    steps = []
    for step in range(STEPS):
        opt.zero_grad()
        sum(loss_of(model, rank, step) / world_size for rank in range(world_size)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        before = {name: p.detach().double().clone() for name, p in names.items()}
        opt.step()
        steps.append({name: numbers(p.grad, before[name], p) for name, p in names.items() if p.grad is not None})
    return steps


def numbers(grad: Tensor, before: Tensor, after: Tensor) -> dict[str, float]:
    update = after.detach().double() - before.double()
    values = (
        grad.double().norm(),
        update.norm(),
        after.double().norm(),
        update.abs().max(),
        (grad == 0).double().mean(),
    )
    return dict(zip(KINDS, (float(value.detach()) for value in values), strict=True))


def read(telemetry: Mapping[str, Any]) -> Numbers:
    return {name: {kind: float(getattr(of, kind)) for kind in KINDS} for name, of in telemetry.items()}


def trained(rank: int, stage: int, **options: Any) -> tuple[list[Numbers], list[Numbers], list[dict[str, int]]]:
    """Of each step the numbers over ranks and those of this rank; and what the last two calls have sent."""
    model = make_model()
    if stage == 3:
        model = zero_optim.shard_module(model, units=(nn.Linear,)) or model
    opt = zero_optim.ShardedAdamW(
        model.named_parameters(), **ADAMW, stage=stage, telemetry_every=1, max_grad_norm=MAX_NORM, **options
    )
    whole, own, sent = [], [], []
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        before = opt.stats()["collectives"]
        with guards.no_host_reads():
            here = opt.telemetry()
        between = opt.stats()["collectives"]
        with guards.no_host_reads():
            over_ranks = opt.telemetry(over_ranks=True)
        after = opt.stats()["collectives"]
        own.append(read(here))
        whole.append(read(over_ranks))
        sent = [_calls(between, before), _calls(after, between)]
        floats = over_ranks.floats()
        assert floats == {f"{kind}/{name}": of[kind] for kind in KINDS for name, of in whole[-1].items()}
    opt.close()
    return whole, own, sent


def _calls(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, int]:
    counts = {kind: of["calls"] - before.get(kind, {"calls": 0})["calls"] for kind, of in after.items()}
    return {kind: count for kind, count in counts.items() if count}


def _runs(rank: int, world_size: int, folder: str) -> list[Any]:
    stores: list[dict[str, Any]] = [{}, {}, {"state_offload": "paged", "device_budget": 0}, {"state_offload": "cpu"}]
    stores += [{"state_offload": f"nvme:{folder}"}]
    return [trained(rank, stage) for stage in (0, 1, 3)] + [trained(rank, 2, **store) for store in stores]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_are_torchs_at_every_stage_and_store(world_size: int, tmp_path: Path) -> None:
    want = expected(world_size)
    results = run_ranks(world_size, _runs, str(tmp_path))
    for runs in results:
        for number, (whole, _, sent) in enumerate(runs):
            assert len(whole) == len(want)
            for step, (found, wanted) in enumerate(zip(whole, want, strict=True)):
                assert found.keys() == wanted.keys(), "the frozen parameter has no numbers"
                for name in wanted:
                    assert found[name] == pytest.approx(wanted[name], rel=3e-5, abs=1e-7), (number, step, name)
            # Nothing is sent without ``over_ranks``, and one message with it.
            assert sent == [{}, {"telemetry": 1} if world_size > 1 else {}]
            assert whole == results[0][number][0], "all ranks have the same"
        assert runs[3][0] == runs[4][0], "another run has the same bits"
        assert runs[3][0] == runs[5][0] == runs[6][0] == runs[7][0], "a store changes no bit"
    # What ranks have of a parameter at stage 2 adds up to all of it.
    parts = [runs[3][1][-1] for runs in results]
    for name, whole in results[0][3][0][-1].items():
        having = [part[name] for part in parts if name in part]
        assert math.sqrt(sum(part["grad_norm"] ** 2 for part in having)) == pytest.approx(whole["grad_norm"], rel=1e-6)
        assert max(part["largest_update"] for part in having) == whole["largest_update"]
    assert world_size == 1 or any(len(part) < len(want[0]) for part in parts)


def test_steps_between_are_not_measured() -> None:
    model = make_model()
    opt = zero_optim.ShardedAdamW(model.named_parameters(), **ADAMW, telemetry_every=2, max_grad_norm=MAX_NORM)
    found = []
    for step in range(STEPS):
        loss_of(model, 0, step).backward()
        opt.step()
        opt.zero_grad()
        found.append(opt.telemetry().floats())
    opt.close()
    second = {f"{kind}/{name}": value for name, of in expected(1)[1].items() for kind, value in of.items()}
    assert found[0] == {} and found[1] == pytest.approx(second, rel=3e-5, abs=1e-7) and found[2] == found[1]


# ---- off -------------------------------------------------------------------------------------------------------------


def test_off_it_makes_no_tensor_and_raises() -> None:
    model = make_model()
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    assert opt.engine.measured is None
    with pytest.raises(zero_optim.ZeroOptimError, match="made without telemetry_every"):
        opt.telemetry()
    opt.close()
    with pytest.raises(ValueError, match="telemetry_every must be None or a number of steps, got 0"):
        zero_optim.ShardedAdamW(model.named_parameters(), telemetry_every=0)
