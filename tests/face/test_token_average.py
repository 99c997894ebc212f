"""``opt.count``: gradients averaged over the tokens of all ranks and micro-batches, on every topology."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cells import slow_where
from guards import no_host_reads
from harness import run_ranks
from topology_cases import TOPOLOGIES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_cases import assert_bitwise, error_of, linear_loss, make_gradients, make_parameters
from zero_optim import (
    GradientError,
    GradScaler,
    RankMismatchError,
    ShardedAdamW,
    ShardedSGD,
)

# -- every topology ----------------------------------------------------------------------------------------------------


def data_rank(name: str, rank: int) -> int:
    """The number of this rank among the data-parallel ones."""
    slices = 2 if "tensor" in name or "plain" in name else 1
    stages = 2 if "pipeline" in name else 1
    return rank // slices % (TOPOLOGIES[name].ranks // (slices * stages))


def counted_and_scaled(rank: int, world_size: int, name: str, stage: int) -> None:
    """Counts whose total is N times a power of two: dividing by it rounds nothing. So parameters and norms have the
    bits of losses that were divided by that."""

    own, micro_batches, pipeline = data_rank(name, rank), 4 if "pipeline" in name else 2, "pipeline" in name
    found = []
    for counts in (True, False):
        job = TOPOLOGIES[name].make(torch.float32)
        opt = ShardedAdamW(job.groups_at(stage), lr=1e-2, stage=stage, **job.given, **job.options)
        scaler = GradScaler(init_scale=2.0**10, enabled=stage % 2 == 1)
        norms = []
        for step, (norm_type, limit) in enumerate([(2.0, 0.1), (2.0, 0.1), (2.0, 0.1), (1.0, 0.5), (math.inf, 0.01)]):
            tokens = [1 + (5 * own + 3 * step) % 15, 15 - (5 * own + 3 * step) % 15]  # 8 a micro-batch on average
            if pipeline:  # torch calls the loss more often than there are micro-batches
                tokens = [32] if rank >= world_size // 2 else []

            def loss_of(loss: Tensor, opt: Any = opt, counts: bool = counts, tokens: list[int] = tokens) -> Tensor:
                if not counts:
                    return loss / (8 * micro_batches)
                if not pipeline:
                    number = tokens.pop()
                    opt.count(torch.tensor(number) if tokens else number)
                return loss

            job.backwards(opt, step, lambda loss, of=loss_of, scaler=scaler: scaler.scale(of(loss)))
            if counts and tokens:
                opt.count(tokens.pop())
            scaler.unscale_(opt)
            norms.append(float(opt.clip_grad_norm_(limit, norm_type)))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        stats = opt.stats()
        sent = {kind: (of["calls"], of["bytes"]) for kind, of in stats["collectives"].items() if kind != "construction"}
        found.append((job.wholes(), norms, stats["skipped_steps"], sent))
        opt.close()
    (parameters, norms, skipped, sent), expected = found
    assert_bitwise([*parameters.values()], [*expected[0].values()], name)
    assert [norm for norm in norms if norm == norm] == [norm for norm in expected[1] if norm == norm]
    assert skipped == expected[2] == 1, "the step in which a rank overflows"
    assert sent == expected[3], "counting sends nothing more"


CELLS = [(name, stage) for name, of in TOPOLOGIES.items() for stage in of.stages]
# Eight ranks take a minute on two cores.
SMALL = {name: of for name, of in TOPOLOGIES.items() if of.ranks <= 4}
FIRST = [(name, of.stages[number % len(of.stages)]) for number, (name, of) in enumerate(SMALL.items())]


@pytest.mark.parametrize(("name", "stage"), slow_where(lambda cell: cell not in FIRST, CELLS))
def test_the_total_divides_on_every_topology(name: str, stage: int) -> None:
    run_ranks(TOPOLOGIES[name].ranks, counted_and_scaled, name, stage, timeout=180)


# -- a language model, and one process in fp64 -------------------------------------------------------------------------

WORDS, WIDTH = 23, 16


def test_telemetry_has_the_norms_of_the_average() -> None:
    params, grads = linear()
    opt = ShardedAdamW(params, telemetry_every=1)
    linear_loss(params, grads).backward()
    opt.count(5)
    opt.step()
    norms = [value for name, value in opt.telemetry().floats().items() if name.startswith("grad_norm/")]
    assert norms == pytest.approx([float(grad.norm() / 5) for grad in grads], rel=1e-5)


# -- windows that cannot be averaged -----------------------------------------------------------------------------------

SHAPES = ((17, 9), (5,))


def linear(seed: int = 0) -> tuple[list[nn.Parameter], Sequence[Tensor]]:
    params = make_parameters(SHAPES, torch.float32)
    return params, make_gradients(params, 0, seed)


def no_tokens(rank: int, world_size: int, stage: int) -> list[Any]:
    params, grads = linear()
    opt, scaler = ShardedAdamW(params, stage=stage), GradScaler(init_scale=4.0)
    scaler.scale(linear_loss(params, [0 * grad for grad in grads])).backward()
    scaler.step(opt)  # the first step learns in which order gradients come
    scaler.update()
    opt.zero_grad()
    before = [p.detach().clone() for p in params]
    with no_host_reads():
        scaler.scale(linear_loss(params, grads)).backward()
        opt.count(torch.zeros(()))
        scaler.step(opt)
        scaler.update()
    assert_bitwise(params, before, "skipped")
    opt.zero_grad()
    scaler.scale(linear_loss(params, grads)).backward()  # and counts of nothing end with the step
    scaler.step(opt)
    stats = opt.stats()
    return [stats["skipped_steps"], stats["non_finite"], scaler.get_scale(), bool((params[0] == before[0]).all())]


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (2, 0), (2, 2)])
def test_without_tokens_a_step_is_skipped_and_the_loss_scale_stays(ranks: int, stage: int) -> None:
    assert run_ranks(ranks, no_tokens, stage) == [[1, None, 4.0, False]] * ranks


def miscounted(rank: int, world_size: int, fault: str) -> tuple[str, str]:
    """What the step raises; and, as all ranks go on alike, that the next one is right."""
    params, grads = linear()
    before = [p.detach().clone() for p in params]
    opt = ShardedAdamW(params)
    for micro in range(2):
        linear_loss(params, grads).backward()
        if not (rank == world_size - 1 and (fault == "a rank" or (fault == "a micro-batch" and micro == 1))):
            opt.count(3)
    error = ("", "")
    try:
        opt.step()
    except (GradientError, RankMismatchError) as raised:
        error = type(raised).__name__, str(raised)
    assert_bitwise(params, before, "nothing was updated")
    opt.zero_grad()
    linear_loss(params, grads).backward()
    opt.count(3)
    opt.step()
    assert not torch.equal(params[0], before[0]) and opt.stats()["skipped_steps"] <= 1
    return error


def test_a_rank_that_does_not_count_is_an_error_on_all() -> None:
    for kind, message in run_ranks(2, miscounted, "a rank"):
        assert kind == "RankMismatchError" and "opt.count() was called in this step on some ranks" in message


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_that_is_not_counted_is_an_error_on_all(ranks: int) -> None:
    errors = run_ranks(ranks, miscounted, "a micro-batch")
    assert {kind for kind, _ in errors} == {"GradientError"}
    assert "this step has 2 backwards, and opt.count() was called for 1" in errors[-1][1]


def counted_before_a_load(rank: int, world_size: int) -> bool:
    """A load that lays the buckets out as they were saved drops gradients, and with them what was counted."""
    _, grads = linear()
    own = make_parameters(SHAPES, torch.float32)
    opt = ShardedSGD(own, lr=1.0)
    linear_loss(own, grads).backward()
    opt.count(5)
    opt.engine.reducer.restore_order([1], [0])
    before = [p.detach().clone() for p in own]
    linear_loss(own, grads).backward()
    opt.count(2)
    opt.step()
    for now, then, grad in zip(own, before, grads, strict=True):
        torch.testing.assert_close(now.detach(), then - grad / 2)
    return True


def test_counts_go_with_the_gradients_that_a_load_drops() -> None:
    assert all(run_ranks(2, counted_before_a_load))


def thawed_on_one(rank: int, world_size: int) -> str:
    """Rank 0 alone has thawed a parameter, whose exchange meets that of the other rank's clip."""
    params, grads = linear()
    params[1].requires_grad_(False)
    opt, scaler = ShardedAdamW(params), GradScaler(init_scale=1.0)
    params[1].requires_grad_(rank == 0)
    scaler.scale(linear_loss(params[:1], grads[:1])).backward()
    try:
        scaler.unscale_(opt)
        opt.clip_grad_norm_(1.0, math.inf)
        scaler.step(opt)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_an_exchange_has_one_size_whatever_norm_is_wanted() -> None:
    for message in run_ranks(2, thawed_on_one):
        assert "is frozen" in message


def test_an_optimizer_is_made_under_another_default_device() -> None:
    params, grads = linear()
    with torch.device("meta"):
        opt = ShardedAdamW(params)
    before = [p.detach().clone() for p in params]
    linear_loss(params, grads).backward()
    opt.step()
    assert all(not torch.equal(p, then) for p, then in zip(params, before, strict=True))


def test_the_order_of_backward_and_count_is_free() -> None:
    params, grads = linear()
    opt = ShardedAdamW(params)
    for first in (True, False):
        for _ in range(3):
            if first:
                opt.count(2)
            linear_loss(params, grads).backward()
            if not first:
                opt.count(1)
                opt.count(1)
        opt.step()
        opt.zero_grad()
    assert opt.stats()["skipped_steps"] == 0


def test_errors_of_the_call() -> None:
    params, grads = linear()
    opt = ShardedAdamW(params)
    for tokens, kind in ((-1, ValueError), (math.nan, ValueError), (torch.ones(2), TypeError), ("3", TypeError)):
        with pytest.raises(kind, match="count"):
            opt.count(tokens)  # type: ignore[arg-type]
    linear_loss(params, grads).backward()
    opt.clip_grad_norm_(1.0)
    with pytest.raises(GradientError, match="before"):
        opt.count(1)


def stages_that_count(rank: int, world_size: int, every: bool) -> str:
    """Two stages of a pipeline of one rank each, that count different numbers; or the last one alone does."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    params, grads = linear()
    opt = ShardedAdamW(params, mesh=mesh["dp"], pipeline=mesh["pp"])
    linear_loss(params, grads).backward()
    if every or rank == 1:
        opt.count(4 + rank)
    return error_of(opt.step)[1]


def test_of_a_pipeline_one_stage_counts() -> None:
    assert run_ranks(2, stages_that_count, False) == ["", ""]
    for message in run_ranks(2, stages_that_count, True):
        assert "different numbers of tokens, [4.0, 5.0]" in message
