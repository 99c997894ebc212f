"""DTensors of tensor parallelism by torch's own styles: what users see of them, traffic, memory, and terms."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

import oracle_float64
import pytest
import torch
import zero_optim
from cells import slow_after
from guards import no_host_reads
from harness import run_ranks
from tensor_cases import HYPER, Block, Gpt, Way, cut, loss_of, losses, make_mesh, make_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from zero_optim import memory


def _optimizer(way: Way, model: Gpt, data: object):
    """``data``: the mesh to average over."""
    given = {} if way.stage == 3 else {"mesh": data}
    if way.stage == 3:
        zero_optim.shard_module(model, (Block,), mesh=data)
    return zero_optim.ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=way.stage)


AtStage = Callable[[int, int], object]


def _at_stages(rank: int, world_size: int, part: int) -> dict[AtStage, list]:
    return {at_stage: [at_stage(rank, stage) for stage in parts[part]] for at_stage, parts in AT_STAGES.items()}


@functools.cache
def _found_at_stages(part: int) -> Sequence[Mapping[AtStage, list]]:
    """By rank, what each of AT_STAGES has found at its stages: in one call."""
    return run_ranks(4, _at_stages, part, timeout=120)


in_parts = pytest.mark.parametrize("part", slow_after(1, (0, 1)))


def _shown(rank: int, stage: int) -> None:
    """Wherever a user looks, parameters and readable gradients are DTensors of the same mesh and placements."""
    mesh = make_mesh(2, 2)
    way = Way(stage=stage)
    model = make_model(way, mesh["tp"])
    before = {name: (p.device_mesh, p.placements, p.shape, p.stride()) for name, p in model.named_parameters()}
    opt = _optimizer(way, model, mesh["dp"])

    def check(what: dict[str, Tensor]) -> None:
        for name, tensor in what.items():
            assert (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()) == before[name], name

    check(dict(model.named_parameters()))
    for step in range(2):
        with losses(sequence=True):
            loss_of(model, rank // 2, step).backward()
        check(dict(model.named_parameters()))
        grads = {name: p.grad for name, p in model.named_parameters()}
        if stage == 0:
            assert all(isinstance(grad, DTensor) for grad in grads.values())
            check(grads)
        else:
            assert all(type(grad) is zero_optim.FlatShard for grad in grads.values())
            assert all(grad.shape == before[name][2] for name, grad in grads.items())
        opt.step()
        opt.zero_grad()
    with zero_optim.gather_parameters(model):
        check(dict(model.named_parameters()))
        assert all(isinstance(p, DTensor) for p in model.parameters())
    opt.close()


@in_parts
def test_parameters_and_readable_gradients_are_dtensors(part):
    _found_at_stages(part)  # which raises what a rank has raised


def _dropped_on_one_rank(rank: int, stage: int) -> tuple[Tensor, Tensor]:
    """In the second step rank 1 drops its term of a norm's gradient: the term of each rank, and the average that was
    made of them."""
    mesh = make_mesh(2, 2)
    model = make_model(Way(), mesh["tp"])
    opt = _optimizer(Way(stage=stage), model, mesh["dp"])
    index = [name for name, _ in model.named_parameters()].index("norm.weight")
    moments = []
    for step in range(2):
        with opt.no_sync(), losses(sequence=True):
            loss_of(model, rank // 2, step).backward()
        term = model.norm.weight.grad.to_local().clone()
        if (rank, step) == (1, 1):
            model.norm.weight.grad = None
        opt.step()
        opt.zero_grad()
        moments.append(zero_optim.full_state_dict(opt, rank=None)["state"][index]["exp_avg"].clone())
    opt.close()
    return term, (moments[1] - 0.9 * moments[0]) / 0.1


@in_parts
def test_a_term_that_is_dropped_on_one_rank_counts_as_zero(part):
    results = [of_rank[_dropped_on_one_rank] for of_rank in _found_at_stages(part)]
    for stage, of_ranks in zip(AT_STAGES[_dropped_on_one_rank][part], zip(*results, strict=True), strict=True):
        terms, averages = zip(*of_ranks, strict=True)
        wanted = (terms[0] + terms[2] + terms[3]) / 2  # two data-parallel ranks
        assert not torch.allclose(wanted, sum(terms) / 2, rtol=1e-2)
        for average in averages:
            torch.testing.assert_close(average, wanted, rtol=1e-5, atol=1e-6, msg=f"at stage {stage}")


# -- memory, traffic ---------------------------------------------------------------------------------------------------


def _accounts(rank: int, stage: int) -> tuple[dict[str, int], ...]:
    """Bytes that a step sends, and that were planned; that are held, and planned."""
    mesh = make_mesh(2, 2)
    way = Way(stage=stage, hidden=37)
    model = make_model(way, mesh["tp"])
    opt = _optimizer(way, model, mesh["dp"])

    def step() -> dict[str, int]:
        with losses(sequence=True):
            loss_of(model, rank // 2, 0).backward()
        opt.step()
        opt.zero_grad()
        return {kind: of["bytes"] for kind, of in opt.stats()["collectives"].items()}

    step()
    before, after = step(), step()
    planned = memory.plan_of(opt)
    kinds = ("parameters", "exp_avg", "exp_avg_sq", "padding") + (("gradients",) if stage < 3 else ())
    held = {kind: opt.stats()["memory"][kind] for kind in kinds}
    terms = [p for name, p in model.named_parameters() if "norm" in name]  # each rank has its part of the sequence
    sent = {kind: after[kind] - before[kind] for kind in (*planned.traffic, "tensor_parallel")}
    wanted = {**planned.traffic, "tensor_parallel": 4 * sum(p.numel() for p in terms)}
    counted = {kind: planned.memory[kind] for kind in kinds}
    if stage == 3:  # gradients are freed, and their padding with them
        held.pop("padding"), counted.pop("padding")
    opt.close()
    return sent, wanted, held, counted


@in_parts
def test_traffic_over_either_link_and_memory_are_as_planned(part):
    for of_rank in _found_at_stages(part):
        for stage, (sent, wanted, held, counted) in zip(AT_STAGES[_accounts][part], of_rank[_accounts], strict=True):
            assert sent == wanted, f"at stage {stage}"
            assert held == counted, f"at stage {stage}"


def _no_host_reads(rank: int, stage: int) -> None:
    mesh = make_mesh(2, 2)
    way = Way(stage=stage, sequence=False)
    model = make_model(way, mesh["tp"])
    opt = _optimizer(way, model, mesh["dp"])
    for step in range(4):
        loss = loss_of(model, rank // 2, step)
        loss.backward()
        with no_host_reads() if step > 1 else contextlib.nullcontext():  # the first ones lay out, and agree
            opt.clip_grad_norm_(1.0)
            opt.step()
        opt.zero_grad()
    opt.close()


@in_parts
def test_a_step_reads_nothing_on_the_host(part):
    _found_at_stages(part)  # which raises what a rank has raised


def _from_meta(rank: int, stage: int) -> tuple[oracle_float64.Report, list[str]]:
    """Trained once, beside the oracle; which parameters differ from their masters, in whole."""
    mesh, way = make_mesh(2, 2), Way(stage=stage, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = make_model(way)
    opt = _optimizer(way, cut(model, mesh["tp"]), mesh["dp"])
    with oracle_float64.watch(opt) as watching:
        with losses(sequence=True):
            loss_of(model, rank // 2, 0).backward()
        opt.step()
        opt.zero_grad()
        report = watching.report()
    masters = dict(zero_optim.iter_full_parameters(model, opt, torch.float32))
    wholes = zero_optim.full_model_state_dict(model, rank=None)
    opt.close()
    return report, [name for name, whole in wholes.items() if not torch.equal(masters[name].bfloat16(), whole)]


def test_a_model_from_meta_is_updated_as_in_float64():
    for of_rank in _found_at_stages(0):
        ((report, differ),) = of_rank[_from_meta]
        assert report.compared > 0 and report.elements.of_bound <= 1
        assert not differ


AT_STAGES: dict[AtStage, tuple[tuple[int, ...], tuple[int, ...]]] = {
    _shown: ((0, 3), (1, 2)),
    _dropped_on_one_rank: ((0, 3), (2,)),
    _accounts: ((1, 3), (0, 2)),
    _no_host_reads: ((2, 3), (0,)),
    _from_meta: ((3,), ()),
}
"""At which stages each is looked at: those in ``make test``, and the others."""
