"""Stage 3 computes what stage 2 does, bit for bit, and so what the oracle and ``torch.optim.AdamW`` do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cells import slow
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, adamw_bound, averages
from sharded_cases import (
    Given,
    GivenNet,
    Net,
    Outcome,
    Run,
    full_state,
    gathered,
    loss_of,
    losses_and_states,
    make,
    tokens,
    train_step,
)
from torch import Tensor, nn
from training_cases import (
    SHAPES,
    assert_bitwise,
    assert_within,
    difference,
    make_gradients,
    make_parameters,
    maybe_no_sync,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACCUMULATIONS = ((1, False), (3, True), (2, False))  # micro-batches; whether all but the last are under no_sync
PREFETCH = (0, 1, 3)
RUNS = (SHAPES[:2], SHAPES[2:5], SHAPES[5:7], SHAPES[7:])  # of GivenNet: three units and the root
HYPER = Hyper(lr=1e-2, weight_decay=0.1)


def parts(outcome: Outcome) -> list[Tensor]:
    """All that must be equal bit for bit, in one order."""
    losses = torch.tensor(outcome.losses, dtype=torch.float64)
    state = [tensor for index in sorted(outcome.state) for tensor in outcome.state[index].values()]
    return [losses, *outcome.parameters.values(), *state]


def assert_as_stage_2(results: Sequence[Sequence[Outcome]], runs: Sequence[Run]) -> None:
    """On each rank, the outcome of each run is that of the first run before it at stage 2."""
    failures = []
    for rank, outcomes in enumerate(results):
        expected = outcomes[0]
        for run, outcome in zip(runs, outcomes, strict=True):
            if run.stage == 2:
                expected = outcome
                continue
            assert outcome.parameters.keys() == expected.parameters.keys()
            assert {index: entry.keys() for index, entry in outcome.state.items()} == {
                index: entry.keys() for index, entry in expected.state.items()
            }
            if found := difference(parts(outcome), parts(expected)):
                failures.append(f"{run}, rank {rank}: {found}")
    assert not failures, "\n".join(failures)


def _matrix(world_size: int, dtype: torch.dtype) -> list[Run]:
    """Every accumulation, at stages 2 and 3. Over the dtypes, each meets each way to reshard and each prefetch."""
    reshards = (True, False, 2 if world_size == 4 else True)
    runs = []
    for number, (micro, no_sync) in enumerate(ACCUMULATIONS):
        turn = number + DTYPES.index(dtype)
        shard = {"reshard_after_forward": reshards[turn % 3], "prefetch": PREFETCH[(turn + number) % 3]}
        options = {"weight_decay": 0.1, "overlap_grad_reduce": (turn + world_size) % 2 == 0}
        run = Run(dtype=dtype, steps=2, micro=micro, no_sync=no_sync, shard=shard, options=options)
        runs += [run.at(2), run]
    return runs


# Four ranks alone have each way to reshard, and meet each dtype.
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        *((1, torch.bfloat16), (3, torch.float32)),
        *((4, dtype) for dtype in DTYPES),
        *(pytest.param(2, dtype, marks=slow) for dtype in DTYPES),
    ],
)
def test_every_cell_equals_stage_2_bit_for_bit(world_size, dtype):
    runs = _matrix(world_size, dtype)
    assert_as_stage_2(run_ranks(world_size, losses_and_states, runs, timeout=120), runs)


def test_accumulation_in_the_reduce_dtype_equals_stage_2():
    options = {"grad_reduce_dtype": torch.float32}
    runs = []
    for micro, no_sync in ACCUMULATIONS:
        run = Run(dtype=torch.bfloat16, steps=2, micro=micro, no_sync=no_sync, options=options)
        runs += [run.at(2), run]
    assert_as_stage_2(run_ranks(3, losses_and_states, runs), runs)


# -- gradients that are given ------------------------------------------------------------------------------------


def _given_run(rank: int, world_size: int, run: Run, grid: int | None) -> list[Tensor]:
    """Parameters after the steps of ``run`` on ``make_gradients``."""
    model, opt = make(run, GivenNet(RUNS, run.dtype, seed=rank), (Given,))
    like = [torch.empty(shape, dtype=run.dtype) for shape in SHAPES]
    for step in range(run.steps):
        for micro in range(run.micro):
            with maybe_no_sync(opt, run.no_sync and micro < run.micro - 1):
                model(make_gradients(like, rank, step, micro, grid)).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return [gathered(model)[name] for name in _names(RUNS)]


def _names(runs: Sequence[Sequence[Any]]) -> list[str]:
    """Of the parameters of ``GivenNet``, in the order of ``runs``."""
    *held, last = runs
    names = [f"units.{unit}.weights.{index}" for unit, run in enumerate(held) for index in range(len(run))]
    return names + [f"weights.{index}" for index in range(len(last))]


def _given_runs(rank: int, world_size: int, runs: Sequence[Run], grid: int | None) -> list[list[Tensor]]:
    return [_given_run(rank, world_size, run, grid) for run in runs]


def _averaged(run: Run, world_size: int, step: int, grid: int | None) -> list[Tensor | None]:
    """Local sums under ``no_sync``, sums of averages without."""
    like = [torch.empty(shape, dtype=run.dtype) for shape in SHAPES]
    reduce_dtype = run.options.get("grad_reduce_dtype")
    local: list[Any] = [None] * world_size
    total = None
    for micro in range(run.micro):
        local = [accumulate(sums, make_gradients(like, rank, step, micro, grid)) for rank, sums in enumerate(local)]
        if not run.no_sync or micro == run.micro - 1:
            total = accumulate(total, averages(local, reduce_dtype))
            local = [None] * world_size
    return total or []


def _expected(run: Run, world_size: int, grid: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters by the oracle, and by ``torch.optim.AdamW`` in fp32, on the same averages."""
    oracle = MasterAdamW(make_parameters(SHAPES, run.dtype), HYPER)
    plain = [p.float().detach().requires_grad_() for p in make_parameters(SHAPES, run.dtype)]
    adamw = torch.optim.AdamW(plain, lr=HYPER.lr, weight_decay=HYPER.weight_decay)
    for step in range(run.steps):
        grads = _averaged(run, world_size, step, grid)
        oracle.step(grads)
        for p, g in zip(plain, grads, strict=True):
            p.grad = None if g is None else g.float()
        adamw.step()
    return oracle.params, [p.detach() for p in plain]


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        *((1, torch.float16), (2, torch.float32), (2, torch.float16), (3, torch.bfloat16)),
        pytest.param(2, torch.bfloat16, marks=slow),
        pytest.param(3, torch.float16, marks=slow),
        pytest.param(4, torch.float32, marks=slow),
    ],
)
def test_given_gradients_make_what_the_oracle_makes(world_size, dtype):
    options = {"weight_decay": HYPER.weight_decay}
    runs = [
        Run(dtype=dtype, steps=2, micro=micro, no_sync=no_sync, lr=HYPER.lr, options=options)
        for micro, no_sync in ACCUMULATIONS
    ]
    if dtype != torch.float32 and world_size == 3:
        runs += [dataclasses.replace(run, options={**options, "grad_reduce_dtype": torch.float32}) for run in runs]
    results = run_ranks(world_size, _given_runs, runs, None)
    for number, run in enumerate(runs):
        oracle, adamw = _expected(run, world_size, None)
        for rank in range(world_size):
            assert_bitwise(results[rank][number], oracle, f"{run}, rank {rank}")
        if dtype == torch.float32:
            bounds = [adamw_bound(p, HYPER.lr, run.steps) for p in adamw]
            assert_within(results[0][number], adamw, bounds, f"{run}, against torch.optim.AdamW")


@pytest.mark.parametrize("world_size", [2, 4])
def test_exact_sums_make_what_stage_0_makes(world_size):
    """Its all-reduce sums in an order of its own: gradients have sums that are exact in any."""
    run = Run(dtype=torch.bfloat16, micro=3, no_sync=True)
    for rank, (of_stage_3, of_stage_0) in enumerate(run_ranks(world_size, _given_runs, [run, run.at(0)], world_size)):
        assert_bitwise(of_stage_3, of_stage_0, f"rank {rank}")


def test_a_model_trains_as_with_adamw_alone():
    """One process on the mean of the ranks' losses: gradients differ by the rounding of sums in another order."""
    run = Run(steps=6, options={"weight_decay": 0.1})
    (_, of_rank_1) = outcomes = [of_rank[0] for of_rank in run_ranks(2, losses_and_states, [run])]
    torch.manual_seed(0)
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=0.1)
    for step in range(run.steps):
        losses = [loss_of(model, tokens(rank, step)) for rank in range(2)]
        for loss, outcome in zip(losses, outcomes, strict=True):
            assert outcome.losses[step] == pytest.approx(float(loss.detach()), rel=2e-5)
        (sum(losses) / 2).backward()
        adamw.step()
        adamw.zero_grad()
    for name, value in model.state_dict().items():
        # Adam divides a gradient by its own size: where it is near zero, rounding alone may turn an update by lr.
        close = (of_rank_1.parameters[name] - value).abs() <= 1e-4 * run.lr * run.steps + 1e-5 * value.abs()
        assert close.float().mean() > 0.98, name
        assert float((of_rank_1.parameters[name] - value).abs().max()) <= 2 * run.lr * run.steps


# -- the loss scale ----------------------------------------------------------------------------------------------------


def _scaled(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """In step 2 the last rank's gradients overflow, in one element of one unit."""
    import zero_optim

    model, opt = make(Run(stage=stage, dtype=torch.float16), GivenNet(RUNS, torch.float16), (Given,))
    scaler = zero_optim.GradScaler(init_scale=64.0, growth_interval=3)
    seen: dict[str, Any] = {"scales": [], "skipped": [], "parameters": []}
    for step in range(5):
        grads = make_gradients(make_parameters(SHAPES, torch.float16), rank, step, grid=world_size)
        if step == 2 and rank == world_size - 1:
            grads[4].view(-1)[0] = math.inf
        scaler.scale(model(grads)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        seen["scales"].append(scaler.get_scale())
        seen["skipped"].append(opt.stats()["skipped_steps"])
        seen["parameters"].append([gathered(model)[name] for name in _names(RUNS)])
    seen["culprit"] = opt.stats()["non_finite"]
    opt.close()
    return seen


def _scaled_at(rank: int, world_size: int, stages: Sequence[int]) -> list[dict[str, Any]]:
    return [_scaled(rank, world_size, stage) for stage in stages]


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size):
    for of_2, of_3 in run_ranks(world_size, _scaled_at, (2, 3)):
        assert of_3["scales"] == of_2["scales"] == [64.0, 64.0, 32.0, 32.0, 32.0]
        assert of_3["skipped"] == of_2["skipped"] == [0, 0, 1, 1, 1]
        assert_bitwise(of_3["parameters"][2], of_3["parameters"][1], "after the skipped step")
        assert difference(of_3["parameters"][3], of_3["parameters"][2])
        for step in range(5):
            assert_bitwise(of_3["parameters"][step], of_2["parameters"][step], f"after step {step}")
        assert of_3["culprit"] is None or of_3["culprit"]["rank"] == world_size - 1


# -- state that moves --------------------------------------------------------------------------------------------


def _adamw_state() -> dict[str, Any]:
    """After two steps of ``torch.optim.AdamW`` on ``Net``, of one process."""
    torch.manual_seed(0)
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss_of(model, tokens(0, step)).backward()
        adamw.step()
        adamw.zero_grad()
    return {"model": model.state_dict(), "optimizer": adamw.state_dict()}


def _continued(rank: int, run: Run, model: nn.Module, opt: Any, steps: Sequence[int]) -> list[Tensor]:
    """All that ``parts`` has, after these steps."""
    losses = [train_step(run, rank, model, opt, step)[0] for step in steps]
    return parts(Outcome(losses, [], gathered(model), full_state(opt), {}))


def _from_adamw(rank: int, world_size: int, saved: dict[str, Any]) -> list[Any]:
    """What was loaded into stages 2 and 3, and both two steps on."""
    import zero_optim

    results = []
    for stage in (2, 3):
        run = Run(stage=stage)
        model = Net()
        model.load_state_dict(saved["model"])
        model, opt = make(run, model)
        zero_optim.load_full_state_dict(opt, saved["optimizer"] if rank == 0 else None)
        loaded = full_state(opt)
        results.append((loaded, _continued(rank, run, model, opt, (2, 3))))
        opt.close()
    return results


def test_state_of_torchs_adamw_loads_into_stage_3():
    saved = _adamw_state()
    for of_2, of_3 in run_ranks(2, _from_adamw, saved):
        for index, entry in saved["optimizer"]["state"].items():
            assert of_3[0][index].keys() == entry.keys()
            assert_bitwise(list(of_3[0][index].values()), list(entry.values()), f"loaded state of {index}")
        assert_bitwise(of_3[1], of_2[1], "two steps on")


def _there_and_back(rank: int, world_size: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Six steps: at stage 2; two each at 2, 3 and 2, handed over as full states."""
    import zero_optim

    torch.manual_seed(rank)
    run = Run(stage=2, dtype=dtype)
    model, opt = make(run, Net())
    whole = _continued(rank, run, model, opt, range(6))[1:]
    opt.close()
    torch.manual_seed(rank)
    model, opt = make(run, Net())
    for stage, steps in ((2, (0, 1)), (3, (2, 3)), (2, (4, 5))):
        if steps[0]:
            weights, saved = gathered(model), zero_optim.full_state_dict(opt, rank=0)
            opt.close()
            model = Net()
            model, opt = make(run.at(stage), model)
            with zero_optim.gather_parameters(model, writeback=True):
                model.load_state_dict(weights)
            zero_optim.load_full_state_dict(opt, saved if rank == 0 else None)
        parted = _continued(rank, run, model, opt, steps)[1:]
    opt.close()
    return [whole, parted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_full_states_carry_a_run_from_stage_2_to_3_and_back(dtype):
    for rank, (whole, parted) in enumerate(run_ranks(3, _there_and_back, dtype)):
        assert_bitwise(parted, whole, f"rank {rank}")
