"""A mixture of experts, which only some ranks share, against the same in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import eventful_cases
import pytest
import torch
from cells import halves, slow
from expert_cases import HYPER, Moe, Way, groups_of, make_mesh, make_model
from harness import run_ranks
from torch import Tensor
from training_cases import maybe_no_sync

Outcome = dict[str, object]
STATE = ("exp_avg", "exp_avg_sq")


def _optimizer(way: Way, model: Moe, mesh: object, **options: object):
    import zero_optim

    return zero_optim.ShardedAdamW(groups_of(model, mesh), **HYPER, stage=way.stage, **way.options, **options)


def _train(way: Way, mesh: object) -> Outcome:
    import zero_optim

    model = make_model(way, mesh)
    opt = _optimizer(way, model, mesh)
    replica, part = mesh.get_local_rank("edp"), mesh.get_local_rank("ep")
    own, experts = 2 * replica + part, [p for name, p in model.named_parameters() if "experts" in name]
    scaler = zero_optim.GradScaler(init_scale=2.0**10) if way.overflow_on is not None else None
    norms = []
    for step in range(way.steps):
        routes = way.routes(mesh, step)
        for micro in range(way.micro):
            with maybe_no_sync(opt, way.no_sync and micro < way.micro - 1):
                loss = way.loss(model, own, step, micro, routes)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if way.clip is not None:
            if scaler is not None:
                scaler.unscale_(opt)
            if way.clip_experts:
                norms.append(float(opt.clip_grad_norm_(0.02, 2.0, experts)))
            norms.append(float(opt.clip_grad_norm_(*way.clip)))
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        opt.zero_grad()
    opt.wait_for_parameters()
    entries = opt.state_dict()["state"]
    found = {
        "part": part,
        "parameters": {name: _here(p).detach().clone() for name, p in model.named_parameters()},
        "state": {name: {kind: _flat(of[kind]) for kind in STATE} for name, of in entries.items()},
        "masters": {name: _flat(of["master"]) for name, of in entries.items() if "master" in of},
        "steps": {name: float(of["step"]) for name, of in entries.items()},
        "norms": norms,
        "skipped": opt.stats()["skipped_steps"],
    }
    if way.stacked:
        found["full"] = zero_optim.full_state_dict(opt, rank=None)["state"]
    opt.close()
    return found


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _flat(tensor: Tensor) -> tuple[int, Tensor]:
    """What this rank has of a state tensor, or of a slice of one: where it begins, and its values."""
    if hasattr(tensor, "local"):
        return tensor.start, tensor.local.clone()
    local = _here(tensor)
    return 0, local.reshape(-1).clone()


def _alone(way: Way) -> Outcome:
    """One process: the mean loss of all four ranks, by ``torch.optim.AdamW``."""
    model = make_model(replace(way, dtype=torch.float32))
    way = replace(way, dtype=torch.float32)
    opt = torch.optim.AdamW(model.parameters(), **HYPER)
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    norms = []
    for step in range(way.steps):
        if way.overflow_on is not None and step == 0:
            norms.append(math.nan)
            continue
        for micro in range(way.micro):
            losses = [way.loss(model, rank, step, micro, way.route(rank, step)) for rank in range(4)]
            (sum(losses) / 4).backward()
        if way.clip is not None:
            if way.clip_experts:
                norms.append(float(torch.nn.utils.clip_grad_norm_(experts, 0.02)))
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), *way.clip)))
        opt.step()
        opt.zero_grad()
    state = {name: opt.state.get(p, {}) for name, p in model.named_parameters()}
    return {"parameters": dict(model.named_parameters()), "state": state, "norms": norms, "opt": opt.state_dict()}


def _in_one_process(name: str, part: int) -> str:
    """What one process calls the expert that a rank calls ``name``."""
    at, _, rest = name.removeprefix("experts.").partition(".")
    return f"experts.{2 * part + int(at)}.{rest}" if name.startswith("experts.") and rest else name


def _slice(whole: Tensor, name: str, part: int, *, stacked: bool) -> Tensor:
    return whole.chunk(2)[part] if stacked and "experts" in name else whole


def _compare(way: Way, found: Outcome, wanted: Outcome, tolerance: float = 1e-5) -> None:
    part = found["part"]
    close = lambda a, b: torch.testing.assert_close(a.float(), b, rtol=10 * tolerance, atol=tolerance)  # noqa: E731
    for name, here in found["parameters"].items():
        whole = _slice(wanted["parameters"][_in_one_process(name, part)], name, part, stacked=way.stacked).detach()
        if way.dtype is torch.float32:
            close(here, whole)
        state = wanted["state"][_in_one_process(name, part)]
        for kind in STATE if state and way.dtype is torch.float32 else ():
            start, values = found["state"][name][kind]
            flat = _slice(state[kind], name, part, stacked=way.stacked).reshape(-1)
            close(values, flat[start:][: len(values)])
        steps = found["steps"].get(name, 0)
        assert steps == float(state.get("step", 0)), name
    assert found["norms"] == pytest.approx(wanted["norms"], rel=10 * tolerance, nan_ok=True)
    assert found["skipped"] == (way.overflow_on is not None)
    if "full" in found and way.dtype is torch.float32:
        assert found["full"].keys() == wanted["opt"]["state"].keys()
        for index, entry in wanted["opt"]["state"].items():
            for kind, value in entry.items():
                close(found["full"][index][kind], value)


def _outcomes(rank: int, world_size: int, ways: list[Way], order: tuple[str, str]) -> list[Outcome]:
    mesh = make_mesh(order)
    return [_train(way, mesh) for way in ways]


WAYS = {
    "clipped by norm 2": Way(clip=(0.05, 2.0)),
    "clipped by the largest": Way(clip=(0.01, math.inf)),
    "clipped by norm 3": Way(clip=(0.05, 3.0)),
    "experts clipped by themselves": Way(clip=(0.05, 2.0), clip_experts=True),
    "no_sync": Way(micro=3, no_sync=True, clip=(0.05, 1.0)),
    "three backwards": Way(micro=3, clip=(0.05, 2.0)),
    "an overflow on one rank": Way(overflow_on=3, clip=(0.05, 2.0)),
    "experts without tokens": Way(starved=True, clip=(0.05, 2.0), steps=4),
    "experts without tokens, by the largest": Way(starved=True, clip=(0.05, math.inf), steps=4),
    "in bf16 and summed in fp32": Way(dtype=torch.bfloat16, options={"grad_reduce_dtype": torch.float32}),
}


@pytest.mark.parametrize(("stage", "half"), halves([(0,), (1,), (2,)]))
def test_trains_as_one_process_does(stage, half):
    """Experts are plain parameters and slices of a DTensor in turn: each way is trained as both."""
    ways = {
        name: replace(way, stage=stage, stacked=(stage + turn) % 2 == 1)
        for turn, (name, way) in enumerate(WAYS.items())
        if turn // 2 % 2 == half
    }
    results = run_ranks(4, _outcomes, [*ways.values()], ("edp", "ep"), timeout=180)
    for number, (name, way) in enumerate(ways.items()):
        wanted = _alone(way)
        for of_rank in results:
            try:
                _compare(way, of_rank[number], wanted)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def _eventful(rank: int, world_size: int, stage: int, folder: str) -> eventful_cases.Outcome:
    mesh, way = make_mesh(), replace(EVENTFUL, stage=stage)

    def make(**options: object) -> eventful_cases.Job:
        model = _freeze(make_model(way, mesh))
        opt = _optimizer(way, model, mesh, **options)

        def backwards(step: int) -> None:
            for micro in range(way.micro):
                with maybe_no_sync(opt, micro < way.micro - 1):
                    loss = way.loss(model, rank, step, micro, way.routes(mesh, step))
                    (loss * math.inf if rank == 3 and step == eventful_cases.OVERFLOW else loss).backward()

        return eventful_cases.Job(model, opt, backwards)

    return eventful_cases.train(make, folder)


EVENTFUL = Way(stacked=True, micro=2, left_out=eventful_cases.ABSENT)


def _freeze(model: Moe) -> Moe:
    for parameter in (model.before.bias, model.experts.up):
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=slow), 2])
def test_all_that_may_happen(stage: int, tmp_path: Path) -> None:
    """Overflows, absent and frozen gradients, ``no_sync``; checkpoints, whole states, state off the device."""
    model = _freeze(make_model(EVENTFUL))

    def backwards(step: int) -> None:
        for micro in range(EVENTFUL.micro):
            losses = [EVENTFUL.loss(model, rank, step, micro, EVENTFUL.route(rank, step)) for rank in range(4)]
            (sum(losses) / 4).backward()

    outcomes = run_ranks(4, _eventful, stage, str(tmp_path))
    eventful_cases.assert_as_in_one_process(outcomes, model, backwards)


def _at_stage_3(rank: int, world_size: int) -> None:
    import torch.distributed as dist
    import zero_optim

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    zero_optim.shard_module(model, (torch.nn.Linear,))
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    dense, experts = list(model[0].parameters()), list(model[1].parameters())
    groups = [{"params": dense}, {"params": experts, "process_group": alone, "grad_divisor": 2}]
    with pytest.raises(ValueError, match="group 1 is of experts, and stage 3 gathers what all ranks have: train the"):
        zero_optim.ShardedAdamW(groups, lr=1e-3)


def test_stage_3_is_refused():
    run_ranks(2, _at_stage_3)
