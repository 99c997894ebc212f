"""`ShardedAdamW` on the GPU: the oracle's bits, the CPU's bits, the same memory from the second step on, NCCL."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_programs import SHAPES, Program, Result, expected, on, parameters, train
from guards import storages_of
from harness import RankFailure, run_ranks
from oracle import Hyper, MasterAdamW, adamw_bound
from places import DEVICE, ON_GPU, Place, needs_gpu, on_kernels, why_not_nccl_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from training_cases import (
    assert_bitwise,
    assert_within,
    copies,
    linear_backward,
    linear_loss,
    make_gradients,
    make_parameters,
)

import zero_kernels

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NCCL_SECONDS = 60
LATE_SHAPES = ((4, 8),) * 4


# ---- numbers ---------------------------------------------------------------------------------------------------------


@on_kernels
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_oracles_bits_and_the_cpus(dtype: torch.dtype, scaled: bool, place: Place) -> None:
    """Groups, schedules, an absent gradient and an overflow; parameters against the oracle, state against the CPU."""
    program = Program(dtype, scaled=scaled)
    with zero_kernels.use_backend(place.backend):
        got = train(program, place.device)
    with zero_kernels.use_backend("reference"):
        on_cpu = train(program, "cpu")
    assert_bitwise(got.params, expected(program), f"parameters on {place}")
    assert got.state.keys() == on_cpu.state.keys()
    assert_bitwise(list(got.state.values()), list(on_cpu.state.values()), f"state on {place}")
    assert (got.skipped, got.scales) == (1, on_cpu.scales)


@on_kernels
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf"), 3.0])
def test_clipping(norm_type: float, place: Place) -> None:
    """The last bit of a norm depends on the device's pow and sum over buckets: within a few units of it."""
    import zero_optim

    hyper, params = Hyper(lr=1e-2), parameters(torch.float32, place.device)
    opt = zero_optim.ShardedAdamW(params, lr=hyper.lr, bucket_cap_mb=0.01)
    oracle = MasterAdamW(make_parameters(SHAPES, torch.float32), hyper)
    with zero_kernels.use_backend(place.backend):
        for step in range(4):
            grads = make_gradients(params, 0, step)
            linear_backward(params, on(place.device, grads))
            norm = opt.clip_grad_norm_(0.5, norm_type).item()
            opt.step()
            opt.zero_grad()
            want = torch.cat([g.double().flatten() for g in grads]).norm(norm_type).item()
            assert norm == pytest.approx(want, rel=1e-6)
            oracle.step(grads, min(1.0, 0.5 / (want + 1e-6)))
    bounds = [2 * adamw_bound(p, hyper.lr, 4) for p in oracle.params]
    assert_within([p.detach().cpu() for p in params], oracle.params, bounds, f"parameters on {place}")
    opt.close()


# ---- memory ----------------------------------------------------------------------------------------------------------

BIG_SHAPES = ((1024, 1024),) * 4


@needs_gpu
@on_kernels
@pytest.mark.parametrize(
    ("dtype", "scaled"), [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False)], ids=str
)
def test_nothing_is_allocated_after_the_second_step(dtype: torch.dtype, scaled: bool, place: Place) -> None:
    """Bytes in use at the same point of each step, and the most that a step needs meanwhile: no shard, no gradient."""
    import zero_optim

    gc.collect()  # what other tests left in cycles must not be freed in between
    params = parameters(dtype, place.device, BIG_SHAPES)
    opt = zero_optim.ShardedAdamW(params, max_grad_norm=1.0, bucket_cap_mb=2.0)
    scaler = zero_optim.GradScaler(init_scale=4.0, enabled=scaled)
    in_use, temporary, storages = [], [], []
    with zero_kernels.use_backend(place.backend):
        for step in range(6):
            loss = linear_loss(params, on(place.device, make_gradients(params, 0, step)))
            scaler.scale(loss).backward()
            del loss
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
            scaler.step(opt)
            scaler.update()
            temporary.append(torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before)
            opt.zero_grad()
            in_use.append(torch.cuda.memory_stats()["allocated_bytes.all.current"])
            storages.append(storages_of(opt))
    opt.close()
    assert in_use[2:] == in_use[1:2] * 4
    assert storages[2:] == storages[1:2] * 4
    most = max(temporary[2:])  # the smallest shard has 1 Mi elements
    assert most < 256 * 1024, f"a step takes {most:,} bytes for itself"


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _train_on_rank(rank: int, world_size: int, program: Program, device: str, backend: str) -> Result:
    """One rank of `train`; on `device` "cuda" it has the GPU of its number, or shares the only one."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    group: Any = dist.new_group(backend=backend, timeout=timedelta(seconds=NCCL_SECONDS))
    return train(program, device, rank, group)


def _check_ranks(results: list[Result], program: Program) -> None:
    want = expected(program, len(results))
    for rank, result in enumerate(results):
        assert_bitwise(result.params, want, f"parameters of rank {rank}")
        assert result.skipped == 1 and result.scales == results[0].scales
        assert result.non_finite == {"parameter": "p0", "rank": 0, "step": 4}


def _program(dtype: torch.dtype, stage: int) -> Program:
    """With a parameter thawed on the way, and with gathers that overlap the forward."""
    return Program(dtype, scaled=dtype == torch.float16, stage=stage, thawed=2, overlap_param_gather=True)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_nccl_rank(dtype: torch.dtype, stage: int) -> None:
    program = _program(dtype, stage)
    _check_ranks(run_ranks(1, _train_on_rank, program, DEVICE, "nccl" if ON_GPU else "gloo", timeout=120), program)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_nccl_ranks(dtype: torch.dtype, stage: int) -> None:
    program = _program(dtype, stage)
    if reason := why_not_nccl_ranks(2):
        pytest.skip(reason)
    try:
        results = run_ranks(2, _train_on_rank, program, DEVICE, "nccl" if ON_GPU else "gloo", timeout=120)
    except RankFailure as failure:
        if ON_GPU and torch.cuda.device_count() == 1 and "Duplicate GPU" in str(failure):
            pytest.skip("one GPU, and this NCCL takes one rank a GPU")
        raise
    _check_ranks(results, program)


def _used_twice(weight: Tensor, x: Tensor) -> Tensor:
    """A loss in which ``weight`` becomes ready twice: each reentrant checkpoint runs a backward of its own."""
    first = checkpoint(lambda t: (t * weight).sum(0), x, use_reentrant=True)
    second = checkpoint(lambda t: (t * weight).sum(0), x * 2, use_reentrant=True)
    return first.sum() + second.sum()


def _late(rank: int, world_size: int, device: str) -> tuple[list[str], bool, list[Tensor]]:
    """After two usual steps parameter 3 becomes ready twice on rank 1. What the two steps from then on raised, whether
    they left the parameters alone, and the parameters after ``observe()`` and two more steps."""
    import zero_optim

    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    params = parameters(torch.float32, device, LATE_SHAPES)
    opt = zero_optim.ShardedAdamW(params, lr=1e-2, stage=0, bucket_cap_mb=1e-5)
    x = torch.ones(4, 8, requires_grad=True, device=device)

    def backward(twice: bool) -> None:
        rest = sum((p * 0.5).sum() for p in params[:3])
        (rest + (_used_twice(params[3], x) if twice else (3 * x.detach() * params[3]).sum())).backward()

    def step(twice: bool) -> str:
        try:
            backward(twice)
            opt.step()
        except zero_optim.GradientError as error:
            return str(error)
        finally:
            opt.zero_grad()
        return ""

    raised = [step(False), step(False)]
    before = copies(params)
    raised += [step(rank == 1)]
    raised += [step(False)] if not raised[-1] else []
    same = all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    opt.observe()
    raised += [step(rank == 1), step(rank == 1)]
    opt.close()
    return raised, same, [p.cpu() for p in copies(params)]


@pytest.mark.ranks
def test_a_late_gradient_is_told_one_step_later_and_skipped_at_once() -> None:
    """The host learns of it without waiting for the device; on a CPU there is nothing to wait for."""
    oracle = MasterAdamW(make_parameters(LATE_SHAPES, torch.float32), Hyper(lr=1e-2))
    for _ in range(4):
        oracle.step([torch.full((4, 8), 0.5)] * 3 + [torch.full((4, 8), 3.0)])
    if reason := why_not_nccl_ranks(2):
        pytest.skip(reason)
    for raised, same, params in run_ranks(2, _late, DEVICE, timeout=120, backend="nccl" if ON_GPU else "gloo"):
        told = [bool(text) for text in raised]
        assert told == [False] * (3 if ON_GPU else 2) + [True, False, False], raised
        assert "observe()" in next(filter(None, raised))
        assert same, "the failed steps left the parameters alone"
        assert_bitwise(params, oracle.params, "after observe()")
