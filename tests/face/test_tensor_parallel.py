"""A GPT cut by torch's own styles of tensor parallelism, times each stage, against the same GPT in one process."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import oracle_float64
import pytest
import torch
from cells import slow, slow_after
from harness import run_ranks
from tensor_cases import HYPER, Block, Gpt, Way, cut, loss_of, losses, make_mesh, make_model
from torch import Tensor
from training_cases import maybe_no_sync

TENSOR = 2
Outcome = dict[str, object]


def _optimizer(way: Way, model: Gpt, data: object):
    """``data``: the mesh to average over."""
    import zero_optim

    given = {} if way.stage == 3 else {"mesh": data}
    if way.stage == 3:
        zero_optim.shard_module(model, (Block,), mesh=data)
    return zero_optim.ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=way.stage, **way.options)


def _train(rank: int, way: Way, mesh: object, data: object = None) -> Outcome:
    import zero_optim

    model = make_model(way, mesh["tp"])
    opt = _optimizer(way, model, mesh["dp"] if data is None else data)
    scaler = zero_optim.GradScaler(init_scale=2.0**10) if way.scaler else None
    norms = []
    for step in range(way.steps):
        for micro in range(way.micro):
            with maybe_no_sync(opt, way.no_sync and micro < way.micro - 1), losses(sequence=way.sequence):
                loss = loss_of(model, rank // TENSOR, step, micro, use=way.use(step))
                if way.overflow_on == rank and step == 0:
                    loss = loss * math.inf
                (loss if scaler is None else scaler.scale(loss)).backward()
        if way.clip is not None:
            if scaler is not None:
                scaler.unscale_(opt)
            norms.append(float(opt.clip_grad_norm_(*way.clip)))
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        opt.zero_grad()
    found = {
        "parameters": {name: whole.clone() for name, whole in zero_optim.iter_full_parameters(model)},
        "norms": norms,
        "state": zero_optim.full_state_dict(opt, rank=None)["state"],
        "skipped": opt.stats()["skipped_steps"],
        "scale": None if scaler is None else scaler.get_scale(),
    }
    opt.close()
    return found


def _alone(way: Way, data: int) -> Outcome:
    """One process: the mean loss of all data-parallel ranks, by ``torch.optim.AdamW``."""
    model = make_model(replace(way, dtype=torch.float32))
    opt = torch.optim.AdamW(model.parameters(), **HYPER)
    norms = []
    for step in range(way.steps):
        if way.overflow_on is not None and step == 0:
            norms.append(math.nan)
            continue
        for micro in range(way.micro):
            (sum(loss_of(model, rank, step, micro, use=way.use(step)) for rank in range(data)) / data).backward()
        if way.clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), *way.clip)))
        opt.step()
        opt.zero_grad()
    return {"parameters": dict(model.named_parameters()), "norms": norms, "state": opt.state_dict()["state"]}


def _compare(found: Outcome, wanted: Outcome, tolerance: float) -> None:
    for name, whole in wanted["parameters"].items():
        torch.testing.assert_close(found["parameters"][name].float(), whole.detach(), rtol=tolerance, atol=tolerance)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=10 * tolerance, nan_ok=True)
    assert found["state"].keys() == wanted["state"].keys()
    for index, entry in wanted["state"].items():
        for kind, value in entry.items():
            torch.testing.assert_close(found["state"][index][kind], value, rtol=10 * tolerance, atol=tolerance)


def _compare_all(ways: Mapping[str, Way], results: Sequence[Sequence[Outcome]], data: int) -> None:
    """``results``: of each rank, in the order of ``ways``. ``data``: how many ranks average gradients."""
    for number, (name, way) in enumerate(ways.items()):
        wanted = _alone(way, data)
        for of_rank in results:
            try:
                _compare(of_rank[number], wanted, 1e-5)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            assert of_rank[number]["skipped"] == (way.overflow_on is not None)
            assert of_rank[number]["scale"] == (2.0**9 if way.scaler else None)


def _outcomes(rank: int, world_size: int, ways: list[Way]) -> list[Outcome]:
    mesh = make_mesh(world_size // TENSOR, TENSOR)
    return [_train(rank, way, mesh) for way in ways]


FROZEN = ("blocks.0.up.weight", "blocks.1.norm1.weight")
WAYS = {
    "clipped by norm 2": Way(clip=(0.5, 2.0)),
    "clipped by the largest": Way(clip=(0.01, math.inf)),
    "clipped by norm 3, plain norms": Way(clip=(0.1, 3.0), sequence=False),
    "no_sync": Way(micro=2, no_sync=True),
    "two backwards": Way(micro=2, clip=(0.5, 1.0)),
    "an overflow on one rank": Way(scaler=True, overflow_on=3, clip=(0.5, 2.0), steps=3),
    "frozen": Way(frozen=FROZEN, clip=(0.5, 2.0)),
    "absent in one step": Way(absent=True, clip=(0.5, 2.0), steps=3),
    "state off the device": Way(options={"state_offload": "cpu"}, micro=2),
    "uneven slices": Way(hidden=5, sequence=False, clip=(0.5, 2.0)),
}


ALL_THAT_HAPPENS = Way(
    steps=4,
    micro=2,
    no_sync=True,
    clip=(0.5, 2.0),
    scaler=True,
    overflow_on=3,
    frozen=FROZEN,
    absent=True,
    options={"state_offload": "cpu"},
)
APART = ("clipped by the largest", "clipped by norm 3, plain norms", "two backwards", "uneven slices")


def _trains_as_one_process_does(ways: Mapping[str, Way]) -> None:
    _compare_all(ways, run_ranks(4, _outcomes, [*ways.values()], timeout=180), 2)


def test_trains_as_one_process_does():
    """All at once at stages 2 and 3, and what is in no other test of slices. In one call: what DTensor has found out of
    an operation is forgotten between calls."""
    ways = {f"all that happens, {stage}": replace(ALL_THAT_HAPPENS, stage=stage) for stage in (2, 3)}
    stages = {"uneven slices": 3, "clipped by norm 3, plain norms": 1}
    apart = {name: replace(WAYS[name], stage=stage) for name, stage in stages.items()}
    _trains_as_one_process_does(ways | apart)


@slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_as_one_process_does_one_by_one(stage):
    """All at once at every stage. One by one at stages 0 to 2 in turns, and at stage 3 what is not in it."""
    turns = {n: way for number, (n, way) in enumerate(WAYS.items()) if stage == number % 3 or stage == 3 and n in APART}
    ways = {**turns, "all that happens": ALL_THAT_HAPPENS}
    _trains_as_one_process_does({name: replace(way, stage=stage) for name, way in ways.items()})


def test_bf16_with_fp32_masters_stays_near_fp32():
    """The masters; ranks of a column agree on every bit."""
    options = {"grad_reduce_dtype": torch.float32}
    ways = [Way(stage=stage, dtype=torch.bfloat16, clip=(0.5, 2.0), options=options) for stage in (1, 3)]
    wanted = _alone(ways[0], 2)
    for of_ranks in zip(*run_ranks(4, _outcomes, ways, timeout=120), strict=True):
        for found in of_ranks:
            assert found["norms"] == pytest.approx(wanted["norms"], rel=0.05)
            masters = [entry["master"] for entry in found["state"].values()]
            for master, whole in zip(masters, wanted["parameters"].values(), strict=True):
                assert (master - whole).abs().mean() < 3e-3
            for name, whole in of_ranks[0]["parameters"].items():
                assert torch.equal(found["parameters"][name], whole)


AtStage = Callable[[int, int], object]


def _at_stages(rank: int, world_size: int, part: int) -> dict[AtStage, list]:
    return {at_stage: [at_stage(rank, stage) for stage in parts[part]] for at_stage, parts in AT_STAGES.items()}


@functools.cache
def _found_at_stages(part: int) -> Sequence[Mapping[AtStage, list]]:
    """By rank, what each of AT_STAGES has found at its stages: in one call, as the trainings above."""
    return run_ranks(4, _at_stages, part, timeout=120)


in_parts = pytest.mark.parametrize("part", slow_after(1, (0, 1)))


def _shown(rank: int, stage: int) -> None:
    """Wherever a user looks, parameters and readable gradients are DTensors of the same mesh and placements."""
    import zero_optim
    from torch.distributed.tensor import DTensor

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
    import zero_optim

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


# -- replicas, memory, traffic -----------------------------------------------------------------------------------


def _replicated(rank: int, world_size: int, way: Way) -> list[Outcome]:
    """Two replicas of two shards of two slices."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    return [_train(rank, way, mesh, mesh["replicate", "shard"])]


@pytest.mark.parametrize("stage", slow_after(1, [2, 3]))
def test_replicas_of_shards_of_slices(stage):
    """At stage 0 nothing is sharded: all data-parallel ranks average as those of one dimension do."""
    way = replace(ALL_THAT_HAPPENS, stage=stage, steps=3)
    _compare_all({"all that happens": way}, run_ranks(8, _replicated, way, timeout=180), 4)


def _accounts(rank: int, stage: int) -> tuple[dict[str, int], ...]:
    """Bytes that a step sends, and that were planned; that are held, and planned."""
    from zero_optim import memory

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
    from guards import no_host_reads

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
    import zero_optim

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
