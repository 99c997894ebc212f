"""Options that a rank has otherwise than the others: all raise at construction, or in the next step, and name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from simulated_gpu.switch import LATE, the_device
from torch import nn
from training_cases import error_of, linear_backward, make_gradients, make_parameters
from zero_optim import RankMismatchError, ShardedAdamW, ShardedMuon, rules, shard_module
from zero_optim.settings import Settings

SHAPES = ((17, 9), (40, 3), (5,))
STEPS, WRONG = 6, 2


# -- at construction ---------------------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "stage": 1,
    "state_over": "all",
    "bucket_cap_mb": 1.0,
    "grad_reduce_dtype": torch.float32,
    "grad_accumulation_dtype": torch.float32,
    "max_grad_norm": 1.0,
    "skip_nonfinite": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "state_offload": "cpu",
    "device_budget": 0,
    "ema_decay": 0.9,
    "master": "fp32",
    "state_dtype": "int8",
    "telemetry_every": 2,
    "check_replicas_every": 2,
}
OF_MODEL: dict[str, Any] = {"reshard_after_forward": False, "prefetch": 2, "param_offload": "cpu", "state_over": "all"}


def _constructed(rank: int, world_size: int, device: bool) -> dict[str, tuple[str, str]]:
    """The error of each option that rank 1 alone gives; of the device, on simulated GPUs."""
    here = torch.device("cpu") if device and rank == 1 else the_device()
    params = [nn.Parameter(p.detach().to(here)) for p in make_parameters(SHAPES, torch.bfloat16)]
    found = {}
    of_opt, of_model = ({"device": None}, {"device": here.type}) if device else (OTHER, OF_MODEL)
    for name, other in of_opt.items():
        always = {"state_offload": "paged"} if name == "device_budget" else {}
        given = {**always, **({name: other} if rank == 1 and not device else {})}
        found[name] = error_of(lambda given=given: ShardedAdamW(params, **given))
    for name, other in of_model.items():
        given = {name: other} if rank == 1 else {}
        model = nn.Sequential(nn.Linear(4, 4))
        found[f"model's {name}"] = error_of(lambda m=model, given=given: shard_module(m, (nn.Linear,), **given))
    return found


@pytest.mark.parametrize("device", [False, True])
def test_ranks_that_are_constructed_with_other_options_raise_together(device: bool) -> None:
    assert OTHER.keys() == Settings.__dataclass_fields__.keys()
    for found in run_ranks(2, _constructed, device, simulated=LATE if device else ""):
        for name, (kind, message) in found.items():
            words = {"ema_decay": "ema", "master": "'master'", "state_dtype": "int8"}.get(name, name.split()[-1])
            assert kind == "RankMismatchError" and words in message, (name, message)


# -- set between steps -------------------------------------------------------------------------------------------------


def _set(name: str, value: Any, group: int = 1) -> Callable[[Any], None]:
    return lambda opt: opt.param_groups[group].__setitem__(name, value)


CHANGES: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "lr": (_set("lr", 0.02), "lr=0.01 in group 1", "lr=0.02 in group 1"),
    "a bit of lr": (_set("lr", 0.010000000000000002), "lr=0.01 in group 1", "lr=0.010000000000000002 in group 1"),
    "a tensor": (_set("lr", torch.tensor(0.5, dtype=torch.float64)), "lr=0.01 in group 1", "lr=0.5 in group 1"),
    "betas": (_set("betas", (0.8, 0.999)), "beta1=0.9 in group 1", "beta1=0.8 in group 1"),
    "decay of an average": (_set("ema_decay", 0.25, 0), "in group 0", "=0.25 in group 0"),
    "the norm": (lambda opt: setattr(opt, "max_grad_norm", 0.5), "max_grad_norm=None", "max_grad_norm=0.5"),
    "overflow": (lambda opt: setattr(opt, "skip_nonfinite", False), "skip_nonfinite=True", "skip_nonfinite=False"),
    "of a rule": (_set("momentum", 0.5, 0), "momentum=0.95 in group 0", "momentum=0.5 in group 0"),
}


def _train(rank: int, world_size: int, change: str, clips: bool) -> tuple[list[tuple[int, str]], list[Any], Any]:
    """The steps that raised, and what; the parameters at the end; what was sent. Rank 1 sets another value for one
    step, between ``clip_grad_norm_`` and ``step`` where it clips."""
    device = the_device()
    params = [nn.Parameter(p.detach().to(device)) for p in make_parameters(SHAPES, torch.float32)]
    if change == "of a rule":
        others = {"params": params[1:], "rule": rules.AdamW(lr=1e-2)}
        opt: Any = ShardedMuon([{"params": params[:1]}, others], lr=1e-2, ema_decay=0.5)
    else:
        opt = ShardedAdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-2, ema_decay=0.5)
    raised = []
    for step in range(STEPS):
        linear_backward(params, [grad.to(device) for grad in make_gradients(params, rank, step)])
        before = [dict(group) for group in opt.param_groups]
        if rank == 1 and step == WRONG and change and not clips:
            CHANGES[change][0](opt)
        try:
            if clips:
                opt.clip_grad_norm_(1e9)
                if rank == 1 and step == WRONG and change:
                    CHANGES[change][0](opt)
            opt.step()
        except RankMismatchError as error:
            raised.append((step, str(error)))
        for group, values in zip(opt.param_groups, before, strict=True):
            group.update(values)
        opt.max_grad_norm, opt.skip_nonfinite = None, True
        opt.zero_grad()
    sent = opt.stats()["collectives"]["exchange"]
    opt.close()
    return raised, [p.detach().cpu() for p in params], (sent["calls"], sent["bytes"])


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_all_ranks_raise_in_the_next_step_and_train_on(change: str, clips: bool) -> None:
    _, usual, there = CHANGES[change]
    of_rank = run_ranks(2, _train, change, clips)
    for raised, params, sent in of_rank:
        ((step, message),) = raised
        assert step == WRONG + 1
        assert usual in message and there in message and "rank 1" in message
        assert all(torch.equal(own, other) for own, other in zip(params, of_rank[0][1], strict=True))
        assert sent == run_ranks(2, _train, "", clips)[0][2], "nothing more is sent"


def _in_other_types(rank: int, world_size: int) -> int:
    params = make_parameters(SHAPES, torch.float32)
    opt = ShardedAdamW(params, max_grad_norm=1.0)
    if rank == 1:
        opt.max_grad_norm, opt.skip_nonfinite = 1, 1
    for step in range(STEPS):
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    return step + 1


def test_equal_numbers_of_other_types_are_equal() -> None:
    assert run_ranks(2, _in_other_types) == [STEPS] * 2


def test_on_a_gpu_they_raise_one_step_later() -> None:
    for raised, _, _ in run_ranks(2, _train, "lr", False, simulated=LATE):
        ((step, message),) = raised
        assert step == WRONG + 2 and "lr=0.02 in group 1" in message


def _replicas(rank: int, world_size: int) -> str:
    """At stage 0 each rank has updated its own copy."""
    params = make_parameters(SHAPES, torch.float32)
    opt = ShardedAdamW(params, stage=0)
    for lr in (0.01 * (1 + rank), 0.01):
        opt.param_groups[0]["lr"] = lr
        linear_backward(params, make_gradients(params, 0, 0))
        try:
            opt.step()
        except RankMismatchError as error:
            return str(error)
    return ""


def test_the_message_says_what_to_do() -> None:
    for message in run_ranks(2, _replicas):
        assert "lr=0.02 in group 0" in message and "set them alike" in message and "load a checkpoint" in message


def test_numbers_without_lower_bits_do_not_cancel() -> None:
    """Zeros, halves and ones have only an exponent: of groups that have swapped them the hash is another."""
    groups = [{"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.0} for _ in range(20)]
    table = ShardedAdamW(groups).engine.hyper
    table._hashes, seen = True, set()
    swaps = [(a, b) for a in range(20) for b in range(a)]
    for a, b in swaps:
        numbers = torch.zeros_like(table._by_group)
        numbers[4, a], numbers[4, b] = 0.5, 0.25
        table._hash(numbers)
        seen.add(tuple(table.hash_bits.tolist()))
    assert len(seen) == len(swaps)
