"""What an earlier step left in the buffers, or on the host, must not reach a later one."""

import gc
import weakref

import pytest
import torch
from harness import run_ranks
from zero_optim import GradScaler, ShardedAdamW

SIZE = 3000


def _parameters(count=3):
    return [torch.nn.Parameter(torch.ones(SIZE)) for _ in range(count)]


def _backward(parameters, scale=1.0):
    sum((p * scale * (index + 1)).sum() for index, p in enumerate(parameters)).backward()


def test_a_bucket_that_is_not_used_counts_neither_in_the_norm_nor_as_overflow():
    first, second = _parameters(2)
    opt = ShardedAdamW([first, second], bucket_cap_mb=0.001)
    (first * float("inf")).sum().backward()
    opt.step()
    opt.zero_grad()
    second.sum().backward()
    assert opt.clip_grad_norm_(1e9).item() == pytest.approx(SIZE**0.5)
    opt.step()
    assert opt.stats()["skipped_steps"] == 1


def _torch_clip_at_stage_0(rank, world_size):
    parameters = _parameters()
    opt = ShardedAdamW(parameters, stage=0)
    _backward(parameters[: 3 - rank])
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
    opt.step()
    return norm, [p.sum().item() for p in parameters]


def test_stage_0_shows_the_average_on_ranks_that_had_not_used_the_parameter():
    first, second = run_ranks(2, _torch_clip_at_stage_0)
    assert first == second
    assert first[0] == pytest.approx((SIZE * (1 + 4 + 1.5**2)) ** 0.5)


def test_a_scaler_skips_whatever_was_decided_when_clipping():
    parameter = torch.nn.Parameter(torch.ones(10))
    opt, scaler = ShardedAdamW([parameter], skip_nonfinite=False), GradScaler(init_scale=4.0)
    scaler.scale((parameter * float("nan")).sum()).backward()
    opt.clip_grad_norm_(1.0)
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(parameter, torch.ones(10))


def test_a_tensor_lr_gives_way_to_a_float_zero():
    parameter = torch.nn.Parameter(torch.ones(10))
    opt = ShardedAdamW([parameter], lr=torch.tensor(0.1), weight_decay=0.0)
    parameter.sum().backward()
    opt.step()
    before = parameter.detach().clone()
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    assert not torch.equal(before, torch.ones(10))
    assert torch.equal(parameter, before)


def _old_buckets_after_a_new_layout(rank, world_size):
    parameters = _parameters(4)
    opt = ShardedAdamW(parameters, stage=2)
    old = [weakref.ref(bucket) for bucket in opt.engine.reducer.buckets]
    gc.collect()
    gc.disable()
    try:
        x = parameters[2]
        for p in (parameters[0], parameters[3], parameters[1]):
            x = x * p
        x.sum().backward()
        opt.step()
        return opt.engine.reducer.layout.order != [3, 2, 1, 0], [ref() is None for ref in old]
    finally:
        gc.enable()


def test_buckets_of_the_first_layout_go_without_the_garbage_collector():
    for laid_out_anew, gone in run_ranks(2, _old_buckets_after_a_new_layout):
        assert laid_out_anew
        assert all(gone)
