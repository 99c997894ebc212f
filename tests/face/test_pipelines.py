"""Pipelines of torch's, by each of its kinds of schedules, against one process that has the whole model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
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
from zero_optim import (
    GradientError,
    GradScaler,
    RankMismatchError,
    ShardedAdamW,
    checkpoint,
    gather_parameters,
    shard_module,
)

STEPS, LR = 3, 1e-2
Values = dict[str, Tensor]


def make(
    schedule: str,
    stage: int,
    dtype: torch.dtype = torch.float32,
    before: Callable[[nn.Module, int], object] = lambda module, number: None,
    **options: Any,
) -> tuple[Pipeline, ShardedAdamW, dist.DeviceMesh, nn.Module]:
    """Two stages on two ranks each. ``before``: is given the modules, with their numbers, before they are sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline(schedule, mesh.get_group("pp"), dtype)
    for index, module in pipeline.modules.items():
        before(module, index)
    own = nn.ModuleDict({str(index): module for index, module in pipeline.modules.items()})
    if stage == 3:
        shard_module(own, (nn.Linear,), mesh=mesh["dp"])
    options = {"lr": LR, "mesh": mesh["dp"], "pipeline": mesh["pp"], **options}
    opt = ShardedAdamW(own.named_parameters(), stage=stage, **options)
    return pipeline, opt, mesh, own


def forward_backward(pipeline: Pipeline, opt: ShardedAdamW, mesh: dist.DeviceMesh, step: int) -> None:
    opt.zero_grad()
    with opt.no_sync():
        pipeline.forward_backward(*batch(step, mesh.get_local_rank("dp")))


def values(own: nn.Module) -> Values:
    with gather_parameters(own) if any(hasattr(p, "plain") for p in own.parameters()) else contextlib.nullcontext():
        return {name: parameter.detach().clone() for name, parameter in own.named_parameters()}


def train(rank: int, world_size: int, schedule: str, stage: int, options: dict[str, Any]) -> tuple[Values, dict, list]:
    pipeline, opt, mesh, own = make(schedule, stage, **options)
    norms = []
    for step in range(STEPS):
        forward_backward(pipeline, opt, mesh, step)
        norms.append(opt.clip_grad_norm_(0.02).item() if step == 1 else 0.0)
        opt.step()
    return values(own), opt.stats()["collectives"], norms


def gradients(model: nn.Module, step: int) -> None:
    """Average over two replicas, and over micro-batches."""
    for replica in range(2):
        for x, target in zip(*(part.chunk(MICRO) for part in batch(step, replica)), strict=True):
            (loss_of(model(x), target) / (2 * MICRO)).backward()


def one_process(schedule: str) -> tuple[Values, list[float]]:
    model = nn.Sequential(*make_blocks(2 * SCHEDULES[schedule]))
    opt, norms = torch.optim.AdamW(model.parameters(), lr=LR), []
    for step in range(STEPS):
        opt.zero_grad()
        gradients(model, step)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.02).item() if step == 1 else 0.0)
        opt.step()
    return dict(model.named_parameters()), norms


def assert_like_one_process(schedule: str, outcomes: Sequence[tuple[Values, dict, list]]) -> None:
    expected, norms = one_process(schedule)
    seen = set()
    for found, _, own_norms in outcomes:
        assert own_norms == pytest.approx(norms, rel=1e-5)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)
        seen |= found.keys()
    assert seen == expected.keys()


REFUSED = ("ScheduleInterleavedZeroBubble", 3)
# Each schedule at every other stage, and each stage with every other schedule, in `make test`.
CELLS = [
    pytest.param(schedule, stage, marks=slow if (turn + stage) % 2 == 0 else ())
    for turn, schedule in enumerate(SCHEDULES)
    for stage in range(4)
    if (schedule, stage) != REFUSED
]


@pytest.mark.parametrize(("schedule", "stage"), CELLS)
def test_a_pipeline_trains_like_one_process(schedule: str, stage: int) -> None:
    outcomes = run_ranks(4, train, schedule, stage, {})
    assert_like_one_process(schedule, outcomes)
    for _, collectives, _ in outcomes:  # one reduction of each bucket in a step, whatever the number of backwards
        reduced = collectives["all_reduce" if stage == 0 else "reduce_scatter"]["calls"]
        assert reduced == STEPS * (2 * SCHEDULES[schedule] if stage == 3 else 4)


@pytest.mark.parametrize("offload", ["cpu", "paged"])
def test_a_pipeline_with_state_off_the_device(offload: str) -> None:
    outcomes = run_ranks(4, train, "Schedule1F1B", 2, {"state_offload": offload})
    assert_like_one_process("Schedule1F1B", outcomes)


def test_backwards_of_weights_apart_are_refused_at_stage_3() -> None:
    with pytest.raises(RankFailure, match="at stage 3 take Schedule1F1B or ScheduleInterleaved1F1B, or take stage 2"):
        run_ranks(4, train, *REFUSED, {})


# -- norms -------------------------------------------------------------------------------------------------------------

NORMS = (1.0, 2.0, math.inf, 3.0)


def all_norms(rank: int, world_size: int) -> list[float]:
    """Of all parameters by each norm, and then of weights alone: each stage has two."""
    pipeline, opt, mesh, own = make("Schedule1F1B", 2)
    found = []
    for norm_type in NORMS:
        forward_backward(pipeline, opt, mesh, 0)
        found.append(opt.clip_grad_norm_(1e9, norm_type).item())
    weights = [parameter for name, parameter in own.named_parameters() if name.endswith("weight")]
    found.append(opt.clip_grad_norm_(1e9, 2.0, weights).item())
    return found


def test_norms_are_those_of_the_whole_model() -> None:
    model = nn.Sequential(*make_blocks(2))
    gradients(model, 0)
    grads = [parameter.grad for parameter in model.parameters()]
    expected = [nn.utils.get_total_norm(grads, norm_type).item() for norm_type in NORMS]
    expected.append(nn.utils.get_total_norm([grad for grad in grads if grad.ndim == 2]).item())
    for found in run_ranks(4, all_norms):
        assert found == pytest.approx(expected, rel=1e-5)


def clipped_by_option(rank: int, world_size: int) -> tuple[Values, dict, list]:
    pipeline, opt, mesh, own = make("Schedule1F1B", 1, max_grad_norm=0.02)
    for step in range(STEPS):
        opt.max_grad_norm = 0.02 if step == 1 else None
        forward_backward(pipeline, opt, mesh, step)
        opt.step()
    return values(own), {}, one_process("Schedule1F1B")[1]


def test_max_grad_norm_is_of_the_whole_model() -> None:
    assert_like_one_process("Schedule1F1B", run_ranks(4, clipped_by_option))


# -- all that may happen -----------------------------------------------------------------------------------------------


def prepared(block: nn.Module, number: int) -> nn.Module:
    """The first stage has a frozen bias."""
    block.up.bias.requires_grad_(number > 0)
    return block


def eventful(rank: int, world_size: int, stage: int, folder: str) -> eventful_cases.Outcome:
    """Two stages on two ranks each. Rank 3, of the last stage, overflows; in another step the last stage is left
    out."""

    def make_job(**options: Any) -> eventful_cases.Job:
        pipeline, opt, mesh, own = make("Schedule1F1B", stage, before=prepared, **eventful_cases.HYPER, **options)

        def backwards(step: int) -> None:
            if rank >= 2:
                own["1"].left_out = step == eventful_cases.ABSENT
            forward_backward(pipeline, opt, mesh, step)
            if rank == 3 and step == eventful_cases.OVERFLOW:
                own["1"].up.bias.grad[2] = math.inf

        return eventful_cases.Job(own, opt, backwards)

    return eventful_cases.train(make_job, f"{folder}/stage-{rank // 2}")


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=slow), 2, 3])
def test_all_that_may_happen(stage: int, tmp_path: Path) -> None:
    """Overflows, absent and frozen gradients; checkpoints, whole states, state off the device."""
    model = nn.Sequential(*(prepared(block, number) for number, block in enumerate(make_blocks(2))))

    def backwards(step: int) -> None:
        model[1].left_out = step == eventful_cases.ABSENT
        gradients(model, step)

    outcomes = run_ranks(4, eventful, stage, str(tmp_path))
    eventful_cases.assert_as_in_one_process(outcomes, model, backwards)


# -- what happens on one stage alone -----------------------------------------------------------------------------------


def overflow(rank: int, world_size: int, stage: int) -> tuple[bool, bool, int, Any]:
    """Rank 3, of the last stage, has a gradient that is not finite in the second step."""
    pipeline, opt, mesh, own = make("Schedule1F1B", stage)
    same = []
    for step in range(3):
        before = values(own)
        forward_backward(pipeline, opt, mesh, step)
        if step == 1 and rank == 3:
            own["1"].up.bias.grad[2] = math.inf
        opt.step()
        after = values(own)
        same.append(all(torch.equal(before[name], after[name]) for name in before))
    return same == [False, True, False], all(same), opt.stats()["skipped_steps"], opt.stats()["non_finite"]


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_not_finite_on_one_stage_skips_the_step_of_all(stage: int) -> None:
    for rank, (skipped_one, _, skipped, culprit) in enumerate(run_ranks(4, overflow, stage)):
        assert skipped_one and skipped == 1
        named = {"parameter": "1.up.bias", "rank": 3, "step": 2}
        assert culprit == (named if rank >= 2 else {"parameter": None, "rank": None, "step": 2})


def alarm(rank: int, world_size: int) -> tuple[str, bool]:
    """Rank 0, of the first stage, has a gradient that cannot be used: its stage raises, and the other does not step."""
    pipeline, opt, mesh, own = make("Schedule1F1B", 2)
    forward_backward(pipeline, opt, mesh, 0)
    if rank == 0:
        own["0"].up.weight.grad = own["0"].up.weight.grad.to_sparse()
    before, raised = values(own), ""
    try:
        opt.step()
    except (GradientError, RankMismatchError) as error:
        raised = str(error)
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
    before, raised, weight = values(own), "", next(iter(own.values())).up.weight
    if "clipped" in how:
        opt.clip_grad_norm_(1.0)
    if rank == 1 and "sparse" in how:
        weight.grad = weight.grad.to_sparse()
    if rank == 1 and "lr" in how:
        opt.param_groups[0]["lr"] = -1.0
    try:
        opt.clip_grad_norm_(1.0, 2.0, [nn.Parameter()]) if rank == 1 and "foreign" in how else opt.step()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
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


def scaled(rank: int, world_size: int, dtype: torch.dtype) -> tuple[Values, list[float], int]:
    """The last stage alone scales the loss. Its first gradient overflows in the second step."""
    pipeline, opt, own = make_narrow(dtype)
    scaler, scales = GradScaler(init_scale=2.0**10, growth_interval=2), []
    if rank == 1:
        pipeline._schedule._loss_fn = lambda out, target: scaler.scale(loss_of(out, target))
    for step in range(4):
        opt.zero_grad()
        pipeline.forward_backward(*(value.to(dtype) for value in batch(step, 0)))
        if step == 1 and rank == 1:
            own["1"].up.bias.grad[0] = math.inf
        if step == 3:
            scaler.unscale_(opt)
            scales.append(opt.clip_grad_norm_(0.1).item())
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return values(own), scales, opt.stats()["skipped_steps"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_last_stage_alone_scales_the_loss(dtype: torch.dtype) -> None:
    outcomes = run_ranks(2, scaled, dtype)
    model = nn.Sequential(*make_blocks(2))
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    norm = 0.0
    for step in (0, 2, 3):
        opt.zero_grad()
        for x, target in zip(*(part.chunk(MICRO) for part in batch(step, 0)), strict=True):
            (loss_of(model(x), target) / MICRO).backward()
        if step == 3:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        opt.step()
    near = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    expected = dict(model.named_parameters())
    for found, (*scales, clipped, last), skipped in outcomes:
        assert scales == [2.0**10, 2.0**9, 2.0**9] and last == 2.0**10 and skipped == 1
        assert clipped == pytest.approx(norm, rel=near["rtol"])
        for name, value in found.items():
            torch.testing.assert_close(value.float(), expected[name], **near)


def without_a_scaler(rank: int, world_size: int) -> str:
    """Only the last stage uses its scaler: gradients of the first are scaled as well."""
    pipeline, opt, own = make_narrow(torch.float16)
    scaler = GradScaler(init_scale=2.0**10)
    if rank == 1:
        pipeline._schedule._loss_fn = lambda out, target: scaler.scale(loss_of(out, target))
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
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        opt.zero_grad()
        model[1].up.bias.requires_grad_(step > 0)
        gradients(model, step)
        opt.step()
    expected = dict(model.named_parameters())
    for found, _, _ in run_ranks(4, frozen_on_one_stage):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)


# -- mistakes, and checkpoints -----------------------------------------------------------------------------------------


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


def resume(rank: int, world_size: int, folder: str) -> tuple[bool, bool]:
    """Each stage has a folder of its own."""
    pipeline, opt, mesh, own = make("Schedule1F1B", 2)
    place = f"{folder}/stage-{mesh.get_local_rank('pp')}"
    forward_backward(pipeline, opt, mesh, 0)
    opt.step()
    checkpoint.save(place, own, opt, step=1)
    forward_backward(pipeline, opt, mesh, 1)
    opt.step()
    expected = values(own)
    opt.close()
    pipeline, opt, mesh, own = make("Schedule1F1B", 3)
    for parameter in own.parameters():
        parameter.local.zero_()
    checkpoint.load(place, own, opt)
    forward_backward(pipeline, opt, mesh, 1)
    opt.step()
    found = values(own)
    return all(torch.equal(expected[name], found[name]) for name in expected), opt.stats()["steps"] == 1


def test_a_stage_is_saved_and_loaded_by_itself(tmp_path: Any) -> None:
    assert run_ranks(4, resume, str(tmp_path)) == [(True, True)] * 4
