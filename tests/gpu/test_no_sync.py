"""In hooks, clipping, `step` and `update` the host never waits for the GPU, and launches follow buckets alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from device_programs import SMALL_CAP_MB, on, parameters, warm_up
from guards import HostRead, no_host_reads
from launches import count_launches
from places import DEVICE, ON_GPU, Place, on_kernels
from training_cases import copies, linear_loss, make_gradients

import zero_kernels

pytestmark = pytest.mark.gpu

CASES = {
    "fp16 scaled, clipped by call": (torch.float16, True, "call"),
    "fp16 scaled, clipped by argument": (torch.float16, True, "argument"),
    "bf16 clipped by call": (torch.bfloat16, False, "call"),
    "bf16, some clipped apart": (torch.bfloat16, False, "some"),
    "bf16": (torch.bfloat16, False, "none"),
    "fp32 clipped by argument": (torch.float32, False, "argument"),
}


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """Inside, torch raises where it would wait for the GPU; on a CPU, where Python reads a value."""
    if not ON_GPU:
        with no_host_reads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_kernels
@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_waits_for_nothing(case: str, place: Place) -> None:
    import zero_optim

    dtype, scaled, clip = CASES[case]
    params = parameters(dtype, place.device)
    opt = zero_optim.ShardedAdamW(params, bucket_cap_mb=SMALL_CAP_MB, max_grad_norm=1.0 if clip == "argument" else None)
    scaler = zero_optim.GradScaler(init_scale=4.0, growth_interval=2, enabled=scaled)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1))
    with zero_kernels.use_backend(place.backend):
        for step in range(6):
            grads = on(place.device, make_gradients(params, 0, step))
            with waits_are_errors() if step >= 2 else contextlib.nullcontext():
                scaler.scale(linear_loss(params, grads)).backward()
                if clip == "call":
                    scaler.unscale_(opt)
                    opt.clip_grad_norm_(1.0)
                if clip == "some":
                    scaler.unscale_(opt)
                    opt.clip_grad_norm_(1.0, parameters=params[:3])
                    opt.clip_grad_norm_(2.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                schedule.step()
    assert opt.stats()["skipped_steps"] == 0
    opt.close()


@on_kernels
def test_a_steady_step_with_a_tensor_for_lr_waits_for_nothing(place: Place) -> None:
    import zero_optim

    params, lr = parameters(torch.bfloat16, place.device), torch.tensor(1e-3, device=place.device)
    opt = zero_optim.ShardedAdamW(params, lr=lr, bucket_cap_mb=SMALL_CAP_MB)
    with zero_kernels.use_backend(place.backend):
        warm_up(opt, params)
        loss = linear_loss(params, on(place.device, make_gradients(params, 0, 3)))
        before = copies(params)
        with waits_are_errors():
            lr.fill_(2e-3)
            loss.backward()
            opt.step()
    assert not torch.equal(before[-1], params[-1])
    opt.close()


def test_the_guard_catches() -> None:
    value = torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError if ON_GPU else HostRead), waits_are_errors():
        value.item()
    assert value.item() == 1


# ---- launches --------------------------------------------------------------------------------------------------------


def launches_of_a_step(place: Place, buckets: int) -> dict[str, int]:
    """What one steady `step` launches over `buckets` buckets of four parameters each."""
    import zero_optim

    params = parameters(torch.bfloat16, place.device, [(64, 128)] * 4 * buckets)
    opt = zero_optim.ShardedAdamW(params, max_grad_norm=1.0, bucket_cap_mb=4 * 64 * 128 * 2 / 2**20)

    def backward() -> None:
        opt.zero_grad()
        linear_loss(params, on(place.device, make_gradients(params, 0, 3))).backward()

    with zero_kernels.use_backend(place.backend):
        warm_up(opt, params)
        launches = count_launches(torch.device(place.device), backward, opt.step)
    assert opt.stats()["buckets"] == buckets
    opt.close()
    return launches or {"kernels": 0, "memcpys": 0, "memsets": 0}


@on_kernels
def test_a_bucket_costs_at_most_three_launches(place: Place) -> None:
    """`grad_stats` and the update, of several small shards at once; what else a step runs does not grow with the
    buckets."""
    few, many = launches_of_a_step(place, 4), launches_of_a_step(place, 12)
    assert many["kernels"] - few["kernels"] <= 3 * (12 - 4), (few, many)
    assert (many["memcpys"], many["memsets"]) == (few["memcpys"], few["memsets"])
    assert few["kernels"] >= 3 or not ON_GPU, "the profiler saw less than the statistics and an update"
