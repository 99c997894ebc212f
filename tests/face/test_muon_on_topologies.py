"""``ShardedMuon`` beside two other rules on every topology: each update is that in float64; the stages of a pipeline
have one norm, and skip a step together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import eventful_cases
import expert_cases
import grid_cases
import megatron_cases
import oracle_float64
import pytest
import tensor_cases
import torch
import torch.distributed as dist
import zero_optim
from cells import slow_where
from eventful_cases import ABSENT, OVERFLOW
from harness import run_ranks
from oracle import PaperLion
from oracle_float64 import Report, assert_rounding_alone
from pipeline_cases import MICRO, Pipeline, batch, loss_of, make_blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zero_optim import rules

STEPS, MAX_NORM = 4, 0.05
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Job:
    """What a rank trains. ``backwards`` makes the gradients of a step, of which the last rank has some that are not
    finite in the step ``OVERFLOW``; ``elements``: those that all ranks which report together have of parameters, each
    as often as it is updated."""

    opt: zero_optim.ShardedMuon
    backwards: Callable[[int], None]
    elements: int

    def step(self, number: int) -> None:
        self.backwards(number)
        self.opt.step()
        self.opt.zero_grad()

    def of_rule(self, rule: str) -> set[str]:
        """Names of the parameters that it updates."""
        engine = self.opt.engine
        return {engine.parameters.name(i) for i in engine.parameters.trained if engine.rules.of(i).name == rule}


Named = Sequence[tuple[str, nn.Parameter]]


def make_optimizer(named: Named, *more: dict[str, Any], **options: Any) -> zero_optim.ShardedMuon:
    """Matrices are Muon's; of the others every second one is AdamW's, and the rest is Lion's."""
    trained = [entry for entry in named if entry[1].requires_grad]
    others = [entry for entry in trained if entry[1].dim() < 2]
    groups = [
        {"params": [entry for entry in trained if entry[1].dim() > 1]},
        {"params": others[0::2], "rule": rules.AdamW(lr=1e-2)},
        {"params": others[1::2], "rule": rules.Lion(lr=1e-3)},
    ]
    options = {"lr": 0.02, "max_grad_norm": MAX_NORM, "bucket_cap_mb": 0.002, **options}
    return zero_optim.ShardedMuon([*groups, *more], **options)


def factor(rank: int, step: int) -> float:
    """Of a loss."""
    return math.inf if step == OVERFLOW and rank == dist.get_world_size() - 1 else 1.0


def numel(named: Named) -> int:
    """Of what is trained, on this rank."""
    return sum(math.prod(p.shape) for _, p in named if p.requires_grad)


# -- topologies --------------------------------------------------------------------------------------------------------


def pipeline(rank: int, stage: int, broken: str = "1.up.bias", dtype: torch.dtype = DTYPE, **options: Any) -> Job:
    """Two stages, each on half of the ranks. The last one has no part in the step ``ABSENT``. ``broken``: the parameter
    whose gradient is not finite on the last rank that has it."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    of_rank = Pipeline("Schedule1F1B", mesh.get_group("pp"), dtype)
    own = nn.ModuleDict({str(number): module for number, module in of_rank.modules.items()})
    if stage == 3:
        zero_optim.shard_module(own, (nn.Linear,), mesh=mesh["dp"])
    named = [*own.named_parameters()]
    opt = make_optimizer(named, stage=stage, mesh=mesh["dp"], pipeline=mesh["pp"], **options)

    def backwards(step: int) -> None:
        for number, module in of_rank.modules.items():
            module.left_out = number == 1 and step == ABSENT
        x, target = batch(step, mesh.get_local_rank("dp"))
        with opt.no_sync():
            of_rank.forward_backward(x.to(dtype), target)
        if step == OVERFLOW and broken in dict(named) and mesh.get_local_rank("dp") == mesh["dp"].size() - 1:
            own.get_parameter(broken).grad.view(-1)[2] = math.inf

    return Job(opt, backwards, numel(named) * (mesh["dp"].size() if stage == 0 else 1))


def net(stage: int, mesh: dist.DeviceMesh, data: eventful_cases.Data, copies: int) -> Job:
    """``data``: of this rank. ``copies``: ranks that update the same."""
    torch.manual_seed(0)
    model = eventful_cases.Net().to(DTYPE)
    if stage == 3:
        zero_optim.shard_module(model, (nn.Linear,), mesh=mesh)
    named = [*model.named_parameters()]
    opt = make_optimizer(named, stage=stage, mesh=mesh)
    given = lambda step, micro: data(step, micro).to(DTYPE)  # noqa: E731

    def backwards(step: int) -> None:
        for micro in range(eventful_cases.MICRO):
            with opt.no_sync() if micro == 0 else contextlib.nullcontext():
                (eventful_cases.loss_of(model, given, step, micro) * factor(dist.get_rank(), step)).backward()

    return Job(opt, backwards, numel(named) * copies)


def tokens(step: int, micro: int, of: int) -> Tensor:
    generator = torch.Generator().manual_seed((step * 10 + micro) * 10 + of)
    return torch.randn(12, eventful_cases.WIDTH, generator=generator)


def context(rank: int, stage: int) -> Job:
    """Two data-parallel ranks, and each has a half of the sequence of one of them."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["dp", "cp"]._flatten("dp_cp")
    part = lambda step, micro: tokens(step, micro, rank // 2).chunk(2)[rank % 2]  # noqa: E731
    return net(stage, both, part, 4 if stage == 0 else 1)


def hybrid(rank: int, stage: int) -> Job:
    """Two replicas of two shards."""
    part = lambda step, micro: tokens(step, micro, rank)  # noqa: E731
    return net(stage, grid_cases.make_mesh(2, 2), part, 4 if stage == 0 else 2)


def plain_slices(rank: int, stage: int) -> Job:
    """Two data-parallel ranks of two slices. A block has no part in the step ``ABSENT``."""
    mesh = tensor_cases.make_mesh(2, 2)
    model = megatron_cases.make_model(mesh["tp"].get_group(), DTYPE)
    told = {"mesh": mesh["dp"], "tensor_parallel": mesh["tp"]}
    if stage == 3:
        zero_optim.shard_module(model, (megatron_cases.Block,), **told)
    named = [*model.named_parameters()]
    opt = make_optimizer(named, stage=stage, **({} if stage == 3 else told))

    def backwards(step: int) -> None:
        use = (0,) if step == ABSENT else (0, 1)
        (megatron_cases.loss_of(model, rank // 2, step, use=use) * factor(rank, step)).backward()

    return Job(opt, backwards, 2 * numel(named) * (2 if stage == 0 else 1))


def experts(rank: int, stage: int) -> Job:
    """Stacks of four experts over two ranks, twice; one stack is Muon's, and one AdamW's. None is used in the step
    ``ABSENT``."""
    mesh = expert_cases.make_mesh()
    way = expert_cases.Way(stacked=True, dtype=DTYPE, left_out=ABSENT)
    model = expert_cases.make_model(way, mesh)
    dense, stacks = [], []
    for name, parameter in model.named_parameters():
        (stacks if name.startswith("experts") else dense).append((name, parameter))
    told = {"mesh": mesh["edp"], "grad_divisor": mesh.size()}
    of_stacks = [{"params": stacks[:1], **told}, {"params": stacks[1:], "rule": rules.AdamW(lr=1e-2), **told}]
    opt = make_optimizer(dense, *of_stacks, stage=stage)

    def backwards(step: int) -> None:
        (way.loss(model, rank, step, 0, way.routes(mesh, step)) * factor(rank, step)).backward()

    return Job(opt, backwards, (4 if stage == 0 else 1) * numel(dense) + (2 if stage == 0 else 1) * numel(stacks))


CASES: dict[str, tuple[int, Callable[..., Job], int]] = {
    "pipeline of two ranks, stage 2": (2, pipeline, 2),
    "pipeline, stage 1": (4, pipeline, 1),
    "pipeline, stage 3": (4, pipeline, 3),
    "context parallel, stage 2": (4, context, 2),
    "context parallel, stage 3": (4, context, 3),
    "hybrid, stage 1": (4, hybrid, 1),
    "hybrid, stage 3": (4, hybrid, 3),
    "plain slices, stage 2": (4, plain_slices, 2),
    "plain slices, stage 3": (4, plain_slices, 3),
    "experts, stage 0": (4, experts, 0),
    "experts, stage 2": (4, experts, 2),
}

# In `make test` each topology at one stage, which meet all stages.
OTHER_STAGES = {"pipeline, stage 1", "context parallel, stage 3", "hybrid, stage 3", "plain slices, stage 2"}
OTHER_STAGES |= {"experts, stage 2"}

# -- each update against float64 ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def wrong_column(opt: Any, rule: str, column: str, factor: float) -> Iterator[None]:
    """Within it updates of this rank, by that rule, are given another coefficient."""

    def begin_pass(by: Any, shard: Any, right: Callable[[Any], Any]) -> Any:
        table = by.hyper[shard.rule].clone()
        table[:, shard.rule.columns.index(column)] *= factor
        return right(replace(by, hyper={**by.hyper, shard.rule: table}))

    with contextlib.ExitStack() as stack:
        for shard in opt.engine.states.shards:
            if shard.rule.name == rule:
                changed = partial(begin_pass, shard=shard, right=shard.begin_pass)
                stack.enter_context(mock.patch.object(shard, "begin_pass", changed))
        yield


FAULTS = {"Muon": "lr", "AdamW": "step_size"}
"""The column of the rate. That of Muon shows in matrices, and that of AdamW in elements."""


def reach(rule: str, opt: Any) -> int:
    """How many elements of this rank it updates. At stage 3 that may be few rows of a matrix, whose direction shows
    little of a fault."""
    shards = [shard for shard in opt.engine.states.shards if shard.rule.name == rule]
    return sum(piece.numel for shard in shards for piece in shard.bucket.pieces)


@dataclass(frozen=True)
class Found:
    """``right``: the report on a training in which all happens; of each fault the rank that had it, names of what its
    rule updates there, and the report on a step with it."""

    elements: int
    right: Report
    wrong: list[tuple[int, set[str], Report]]


def compared(rank: int, world_size: int, case: str) -> Found:
    _, make, stage = CASES[case]
    job, wrong = make(rank, stage), []
    with oracle_float64.watch(job.opt) as watching:
        for step in range(STEPS):
            job.step(step)
        right = watching.report()
    assert job.opt.stats()["skipped_steps"] == 1
    for rule, column in FAULTS.items():
        told: list[Any] = [None] * world_size
        dist.all_gather_object(told, (reach(rule, job.opt), job.of_rule(rule)))
        bad = max(range(world_size), key=lambda other: (told[other][0], other))
        planted = wrong_column(job.opt, rule, column, 1.1) if rank == bad else contextlib.nullcontext()
        with oracle_float64.watch(job.opt) as watching, planted:
            job.step(STEPS)
            wrong.append((bad, told[bad][1], watching.report()))
    job.opt.close()
    return Found(job.elements, right, wrong)


def assert_right(report: Report, compared: int) -> None:
    assert report.compared == compared
    assert_rounding_alone(report)


@pytest.mark.parametrize("case", slow_where(OTHER_STAGES.__contains__, CASES))
def test_each_update_is_that_in_float64_and_a_wrong_rate_is_found(case: str) -> None:
    """In a pipeline the ranks of a stage report together."""
    ranks, make, _ = CASES[case]
    together = ranks // 2 if make is pipeline else ranks
    every = run_ranks(ranks, compared, case)
    for rank, found in enumerate(every):
        first = rank // together * together
        assert found == every[first]
        assert_right(found.right, STEPS * found.elements)
        for rule, (bad, names, report) in zip(FAULTS, found.wrong, strict=True):
            if bad // together * together != first:
                assert_right(report, found.elements)
                continue
            assert report.matrices is not None and report.unrounded == 0
            by_kind = {"Muon": report.matrices, "AdamW": report.elements}
            assert {kind for kind, worst in by_kind.items() if worst.of_bound > 1} == {rule}, report
            assert by_kind[rule].parameter in names, report


# -- the stages of a pipeline ------------------------------------------------------------------------------------------


def local_bits(opt: Any) -> dict[str, Tensor]:
    """What this rank has: state as it is stored, by parameter and name, and the parameters."""
    state = {f"{key}/{name}": value for key, of in opt.state_dict()["state"].items() for name, value in of.items()}
    for group in opt.param_groups:
        state |= dict(zip(group["param_names"], group["params"], strict=True))
    return {name: getattr(tensor, "local", tensor).detach().clone() for name, tensor in state.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) > 10
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


SMALL = {"master": "split8", "state_dtype": "int8", "ema_decay": 0.9, "ema_dtype": "bf16_stochastic"}
NOISY = {"state_dtype": "bf16_stochastic", "ema_decay": 0.9}


def skips(rank: int, world_size: int, stage: int, broken: str, options: dict[str, Any]) -> None:
    """A skipped step between others, and a training that never had it."""
    ends = []
    for steps in ((0, OVERFLOW, 3), (0, 3)):
        job = pipeline(rank, stage, broken, **options)
        for step in steps:
            before = local_bits(job.opt)
            job.step(step)
            same = [torch.equal(value, before[name]) for name, value in local_bits(job.opt).items()]
            assert all(same) if step == OVERFLOW else not all(same)
        ends.append(local_bits(job.opt))
        skipped, culprit = job.opt.stats()["skipped_steps"], job.opt.stats()["non_finite"]
        assert skipped == len(steps) - 2
        if skipped:
            own = broken.startswith(str(rank // 2))
            assert culprit == {
                "parameter": broken if own else None,
                "rank": 1 + 2 * (rank // 2) if own else None,
                "step": 2,
            }
        job.opt.close()
    same_bits(*ends)


MATRIX, BIAS = "0.down.weight", "1.up.bias"


@pytest.mark.parametrize(
    ("stage", "broken", "options"),
    [(1, BIAS, SMALL), (2, MATRIX, NOISY), (3, MATRIX, SMALL)],
    ids=["stage 1, small", "stage 2, noisy", "stage 3, small"],
)
def test_what_is_not_finite_on_one_stage_leaves_no_trace_on_any(stage: int, broken: str, options: Any) -> None:
    """In a matrix of the first stage, or in a bias of the last, which AdamW updates."""
    run_ranks(4, skips, stage, broken, options)


MUON = {"lr": 0.02, "momentum": 0.875, "weight_decay": 0.1}  # of which torch's lerp has nothing to fuse
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.01}
LION: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}


def clipped(rank: int, world_size: int) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
    """By the call, and in every second step by the option."""
    job, norms = pipeline(rank, 2, dtype=torch.float32, ns_gram=False, **MUON), []
    for step in CLIPPED:
        job.backwards(step)
        if step % 2 == 0:
            norms.append(job.opt.clip_grad_norm_(MAX_NORM).item())
        job.opt.step()
        job.opt.zero_grad()
    state = zero_optim.full_state_dict(job.opt, rank=None)["state"]
    names = [name for group in job.opt.param_groups for name in group["param_names"]]
    return norms, {names[index]: of for index, of in state.items()}


CLIPPED = (0, 3, 4)


def test_the_stages_of_a_pipeline_clip_by_one_norm() -> None:
    """That of torch in one process. A direction says nothing of the length of gradients, but a momentum does."""
    model, norms = nn.ModuleDict({str(number): block for number, block in enumerate(make_blocks(2))}), []
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.dim() > 1]
    up, down = ([named[f"{number}.{layer}.bias"] for number in range(2)] for layer in ("up", "down"))
    opts = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(up, **ADAM), PaperLion(down, **LION)]
    for step in CLIPPED:
        for replica in range(2):
            for x, target in zip(*(part.chunk(MICRO) for part in batch(step, replica)), strict=True):
                (loss_of(model["1"](model["0"](x)), target) / (2 * MICRO)).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        norms += [norm] if step % 2 == 0 else []
        for opt in opts:
            opt.step()
            opt.zero_grad()
        assert norm > 2 * MAX_NORM
    state = {name: opt.state[p] for opt in opts for name, p in named.items() if p in opt.state}
    every = run_ranks(4, clipped)
    assert set().union(*(of for _, of in every)) == state.keys() and len({tuple(found) for found, _ in every}) == 1
    for found, of_stage in every:
        assert found == pytest.approx(norms, rel=1e-3)
        for name, of in of_stage.items():
            for kind in {"momentum_buffer", "exp_avg"} & of.keys():
                wanted = state[name][kind]
                torch.testing.assert_close(of[kind], wanted, rtol=0, atol=0.01 * float(wanted.abs().max()))
