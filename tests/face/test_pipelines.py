"""Pipelines of torch's: reductions of each schedule, what happens on one stage alone, and mistakes."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable
from typing import Any

import eventful_cases
import pytest
import torch
import torch.distributed as dist
from cells import slow
from harness import RankFailure, run_ranks
from pipeline_cases import MICRO, SCHEDULES, Pipeline, batch, loss_of, make_blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_cases import error_of
from zero_optim import GradScaler, RankMismatchError, ShardedAdamW, gather_parameters, shard_module
from zero_optim.engine import open_engines

STEPS, LR = 3, 1e-2
Values = dict[str, Tensor]


def make(
    schedule: str,
    stage: int,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., Any] = eventful_cases.adamw,
    **options: Any,
) -> tuple[Pipeline, Any, dist.DeviceMesh, nn.Module]:
    """Two stages on two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline(schedule, mesh.get_group("pp"), dtype)
    own = nn.ModuleDict({str(index): module for index, module in pipeline.modules.items()})
    if stage == 3:
        shard_module(own, (nn.Linear,), mesh=mesh["dp"])
    options = {"mesh": mesh["dp"], "pipeline": mesh["pp"], **options}
    opt = optimizer([{"params": [*own.named_parameters()]}], stage=stage, **options)
    return pipeline, opt, mesh, own


def forward_backward(
    pipeline: Pipeline, opt: Any, mesh: dist.DeviceMesh, step: int, dtype: torch.dtype = torch.float32
) -> None:
    opt.zero_grad()
    x, target = batch(step, mesh.get_local_rank("dp"))
    with opt.no_sync():
        pipeline.forward_backward(x.to(dtype), target)


def values(own: nn.Module) -> Values:
    with gather_parameters(own) if any(hasattr(p, "plain") for p in own.parameters()) else contextlib.nullcontext():
        return {name: parameter.detach().clone() for name, parameter in own.named_parameters()}


def gradients(model: nn.Module, step: int) -> None:
    """Average over two replicas, and over micro-batches."""
    for replica in range(2):
        for x, target in zip(*(part.chunk(MICRO) for part in batch(step, replica)), strict=True):
            (loss_of(model(x), target) / (2 * MICRO)).backward()


REFUSED = ("ScheduleInterleavedZeroBubble", 3)
# Each schedule at every other stage, and each stage with every other schedule, in `make test`.
CELLS = [
    pytest.param(schedule, stage, marks=slow if (turn + stage) % 2 == 0 else ())
    for turn, schedule in enumerate(SCHEDULES)
    for stage in range(4)
    if (schedule, stage) != REFUSED
]


def reductions(rank: int, world_size: int, schedule: str, stage: int) -> tuple[int, int]:
    """Of two steps, and how many buckets there are. The first step lays them out."""
    pipeline, opt, mesh, _ = make(schedule, stage)
    calls = []
    for step in range(STEPS):
        forward_backward(pipeline, opt, mesh, step)
        opt.step()
        calls.append(opt.stats()["collectives"]["all_reduce" if stage == 0 else "reduce_scatter"]["calls"])
    return calls[2] - calls[0], opt.stats()["buckets"]


@pytest.mark.parametrize(("schedule", "stage"), CELLS)
def test_a_step_reduces_each_bucket_once_whatever_the_number_of_backwards(schedule: str, stage: int) -> None:
    for calls, buckets in run_ranks(4, reductions, schedule, stage):
        assert calls == 2 * buckets > 0


def test_backwards_of_weights_apart_are_refused_at_stage_3() -> None:
    with pytest.raises(RankFailure, match="at stage 3 take Schedule1F1B or ScheduleInterleaved1F1B, or take stage 2"):
        run_ranks(4, reductions, *REFUSED)


# -- what happens on one stage alone -----------------------------------------------------------------------------------


def bits(opt: Any) -> dict[str, Tensor]:
    """What this rank has: state as it is stored, by parameter and name, and the parameters."""
    state = {f"{key}/{name}": value for key, of in opt.state_dict()["state"].items() for name, value in of.items()}
    for group in opt.param_groups:
        state |= dict(zip(group["param_names"], group["params"], strict=True))
    return {name: getattr(tensor, "local", tensor).detach().clone() for name, tensor in state.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def skips(rank: int, world_size: int, rule: str, stage: int, broken: str, options: dict[str, Any]) -> None:
    """A step in which the last rank that has ``broken`` overflows, between others; and a training that never had it."""
    dtype, optimizer = eventful_cases.RULES[rule]
    ends = []
    for steps in ((0, None, 3), (0, 3)):
        pipeline, opt, mesh, own = make("Schedule1F1B", stage, dtype, optimizer=optimizer, **options)
        for step in steps:
            before = bits(opt)
            forward_backward(pipeline, opt, mesh, step or 0, dtype)
            if step is None and broken in dict(own.named_parameters()) and mesh.get_local_rank("dp") == 1:
                own.get_parameter(broken).grad.view(-1)[2] = math.inf
            opt.step()
            assert same(bits(opt), before) is (step is None)
        ends.append(bits(opt))
        skipped, culprit = opt.stats()["skipped_steps"], opt.stats()["non_finite"]
        assert skipped == len(steps) - 2 and len(ends[-1]) > 10
        if skipped:
            has = broken.startswith(str(rank // 2))
            place = {"parameter": broken if has else None, "rank": 1 + 2 * (rank // 2) if has else None, "step": 2}
            # Reduced as it is, a gradient is known to the rank whose shard of the sum is not finite.
            owner = {**place, "rank": 2 * (rank // 2) if has else None}
            assert culprit in (place, owner)
        opt.close()
    assert same(*ends)


SMALL = {"master": "split8", "state_dtype": "int8", "ema_decay": 0.9}
NOISY = {"state_dtype": "bf16", "ema_decay": 0.9}
MIXED, MATRIX, BIAS = "Muon, AdamW and Lion", "0.down.weight", "1.up.bias"


@pytest.mark.parametrize(
    ("rule", "stage", "broken", "options"),
    [("AdamW", 0, BIAS, {}), (MIXED, 1, BIAS, SMALL), (MIXED, 2, MATRIX, NOISY), (MIXED, 3, MATRIX, SMALL)],
    ids=["stage 0", "stage 1, small", "stage 2, noisy", "stage 3, small"],
)
def test_what_is_not_finite_on_one_stage_skips_the_step_of_all(
    rule: str, stage: int, broken: str, options: Any
) -> None:
    """In a matrix of the first stage, or in a bias of the last. It leaves no trace."""
    run_ranks(4, skips, rule, stage, broken, options)


def alarm(rank: int, world_size: int) -> tuple[str, bool]:
    """Rank 0, of the first stage, has a gradient that cannot be used: its stage raises, and the other does not step.
    The order of buckets is learned in between: what was refused moves along (it was lost)."""
    pipeline, opt, mesh, own = make("Schedule1F1B", 2)
    forward_backward(pipeline, opt, mesh, 0)
    if rank == 0:
        own["0"].up.weight.grad = own["0"].up.weight.grad.to_sparse()
    before = values(own)
    _, raised = error_of(opt.step)
    after = values(own)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    for _ in range(2):  # all of them go on
        forward_backward(pipeline, opt, mesh, 0)
        opt.step()
    return raised, unchanged


def test_a_stage_that_raises_makes_the_others_raise() -> None:
    for rank, (raised, unchanged) in enumerate(run_ranks(4, alarm)):
        assert unchanged
        assert ("0.up.weight" if rank < 2 else "stage 0 of the pipeline has failed") in raised


def left_open(rank: int, world_size: int) -> int:
    """Optimizers that are there when a program is over that has raised, and has closed nothing."""
    alarm(rank, world_size)
    gc.collect()
    return len(open_engines())


def test_an_optimizer_that_has_raised_is_collected() -> None:
    assert run_ranks(4, left_open) == [0] * 4


# -- one data-parallel rank a stage ------------------------------------------------------------------------------------


def make_narrow(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Pipeline, ShardedAdamW, nn.Module]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline("Schedule1F1B", mesh.get_group("pp"), dtype)
    own = nn.ModuleDict({str(index): module for index, module in pipeline.modules.items()})
    opt = ShardedAdamW(own.named_parameters(), lr=LR, mesh=mesh["dp"], pipeline=mesh["pp"], **options)
    return pipeline, opt, own


def failing_alone(rank: int, world_size: int, how: str) -> tuple[str, bool, int]:
    """Something is wrong on the last stage alone, which raises before the stages exchange, or after they have."""
    pipeline, opt, own = make_narrow()
    pipeline.forward_backward(*batch(0, 0))
    before, weight = values(own), next(iter(own.values())).up.weight
    if "clipped" in how:
        opt.clip_grad_norm_(1.0)
    if rank == 1 and "sparse" in how:
        weight.grad = weight.grad.to_sparse()
    if rank == 1 and "lr" in how:
        opt.param_groups[0]["lr"] = -1.0
    clips = rank == 1 and "foreign" in how
    raised = ": ".join(error_of(lambda: opt.clip_grad_norm_(1.0, 2.0, [nn.Parameter()]) if clips else opt.step()))
    unchanged = all(torch.equal(before[name], value) for name, value in values(own).items())
    opt.param_groups[0]["lr"] = LR
    for _ in range(2):
        opt.zero_grad()
        pipeline.forward_backward(*batch(0, 0))
        opt.step()
    return raised, unchanged, opt.stats()["steps"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("sparse", "GradientError: the gradient of '1.up.weight'"),
        ("lr", "ValueError: lr of parameter group 0"),
        ("clipped, lr", "ValueError: lr of parameter group 0"),
        ("foreign", "ParameterError"),
    ],
)
def test_a_narrow_stage_that_raises_makes_the_other_raise(how: str, reason: str) -> None:
    (other, *first), (own, *last) = run_ranks(2, failing_alone, how)
    assert own.startswith(reason)
    assert other.startswith("RankMismatchError: stage 1 of the pipeline has failed")
    assert first == last == [True, 2]


def edited(rank: int, world_size: int, how: str, clips: bool) -> tuple[Values, int]:
    """The last stage edits a gradient, after all have clipped by a norm that is never reached, or without that."""
    pipeline, opt, own = make_narrow(skip_nonfinite=True)
    for step in range(3):
        opt.zero_grad()
        pipeline.forward_backward(*batch(step, 0))
        if clips:
            opt.clip_grad_norm_(1e9)
        if rank == 1 and step == 1:
            weight = own["1"].up.weight
            if how == "scaled":
                weight.grad.mul_(0.5)
            elif how == "dropped":
                weight.grad = None
            else:
                weight.grad = weight.grad * {"assigned": 3.0, "inf": math.inf}[how]
        opt.step()
    return values(own), opt.stats()["skipped_steps"]


@pytest.mark.parametrize("how", ["scaled", "assigned", "dropped", "inf"])
def test_gradients_may_be_edited_after_clipping_on_a_narrow_stage(how: str) -> None:
    clipped, plain = run_ranks(2, edited, how, True), run_ranks(2, edited, how, False)
    for (found, skipped), (expected, also) in zip(clipped, plain, strict=True):
        assert skipped == also == (how == "inf")
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def without_a_scaler(rank: int, world_size: int) -> str:
    """Only the last stage uses its scaler: gradients of the first are scaled as well."""
    pipeline, opt, own = make_narrow(torch.float16)
    scaler = GradScaler(init_scale=2.0**10)
    if rank == 1:
        pipeline.scaled = scaler.scale
    pipeline.forward_backward(*map(Tensor.half, batch(0, 0)))
    with pytest.raises(RankMismatchError) as error:
        scaler.step(opt) if rank == 1 else opt.step()
    return str(error.value)


def test_stages_with_other_loss_scales_raise() -> None:
    for message in run_ranks(2, without_a_scaler):
        assert "different loss scales: 1 on stage 0, 1024 on stage 1" in message


def frozen_on_one_stage(rank: int, world_size: int) -> tuple[Values, dict, list]:
    """A parameter of the last stage is thawed after the first step: that stage exchanges twice in the second."""
    pipeline, opt, mesh, own = make("Schedule1F1B", 2)
    frozen = own["1"].up.bias if rank >= 2 else None
    for step in range(STEPS):
        if frozen is not None:
            frozen.requires_grad_(step > 0)
        forward_backward(pipeline, opt, mesh, step)
        opt.step()
    return values(own), {}, []


def test_a_parameter_that_thaws_on_one_stage() -> None:
    model = nn.Sequential(*make_blocks(2))
    opt = eventful_cases.torch_adamw(model)
    for step in range(STEPS):
        opt.zero_grad()
        model[1].up.bias.requires_grad_(step > 0)
        gradients(model, step)
        opt.step()
    expected = dict(model.named_parameters())
    for found, _, _ in run_ranks(4, frozen_on_one_stage):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def mistakes(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    raised = []
    for kind, options in (
        (ValueError, {"pipeline": mesh}),
        (TypeError, {"pipeline": "pp"}),
        (RankMismatchError, {"pipeline": mesh["pp"], "max_grad_norm": 1.0 if rank < 2 else None}),
        ((ValueError, RankMismatchError), {"pipeline": mesh["pp"].get_group(), "lr": -1.0 if rank < 2 else 1.0}),
    ):
        with pytest.raises(kind) as error:
            ShardedAdamW(nn.Linear(4, 4).parameters(), mesh=mesh["dp"], **options)
        raised.append(str(error.value))
    return raised


def test_mistakes_are_told_on_every_rank() -> None:
    for rank, (mesh, text, differs, failed) in enumerate(run_ranks(4, mistakes)):
        assert "pipeline is a mesh of 2 dimensions, ('pp', 'dp')" in mesh
        assert "pipeline is a str: give a DeviceMesh, as mesh['pp'], or a process group" in text
        first, second = rank % 2, 2 + rank % 2  # the stages of its column
        assert f"rank {first} has max_grad_norm=1.0; rank {second} has max_grad_norm=None" in differs
        assert "lr of parameter group 0 must be 0 or more" in failed
        assert (f"rank {first} failed" in failed) == (rank >= 2)
