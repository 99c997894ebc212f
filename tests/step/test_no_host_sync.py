"""From backward to the end of ``step`` and ``update`` nothing waits for the device.

Two nets: every way in which Python reads a tensor raises, and the ops that are dispatched come from a list of ones that
leave values on the device. The list is closed: a new op in the step has to be looked at before it is added.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import zero_optim
from guards import OpLog, no_host_reads
from harness import run_ranks
from training_cases import TINY_CAP_MB, linear_loss, make_gradients, make_parameters, maybe_no_sync

SHAPES = ((17, 9), (300,), (1,), (40, 25))
KERNELS = {f"zero_kernels::{name}" for name in ("foreach_step", "pack", "unpack", "grad_stats", "hyper_table")}
COLLECTIVES = {
    f"c10d::{name}" for name in ("allreduce_", "scatter_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_")
}
VIEWS = {
    f"aten::{name}"
    for name in ("alias", "as_strided", "detach", "expand", "select", "slice", "split", "t", "unbind", "view")
}
VIEWS |= {f"aten::{name}" for name in ("reshape", "_unsafe_view", "unsqueeze", "squeeze", "view_as", "_reshape_alias")}
MAKERS = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "ones_like", "zeros", "zeros_like", "full", "full_like", "new_zeros")
}
MAKERS |= {"aten::new_empty", "aten::scalar_tensor", "aten::lift_fresh", "aten::arange", "aten::new_empty_strided"}
_POINTWISE = """
abs add argmax bitwise_and bitwise_not bitwise_or clone clamp clamp_max copy div eq exp fill ge gt isfinite le
bitwise_right_shift bitwise_xor
logical_and logical_not logical_or lt maximum minimum mul ne neg pow remainder reciprocal rsub sqrt sub where zero
nan_to_num _to_copy sum amax max any all cat stack index_select gather addcmul lerp
_foreach_add _foreach_mul _foreach_copy _foreach_zero
"""
POINTWISE = {f"aten::{name}" for name in _POINTWISE.split()}
ALLOWED = KERNELS | COLLECTIVES | VIEWS | MAKERS | POINTWISE | {f"{name}_" for name in POINTWISE}
ALLOWED |= {"profiler::_record_function_enter_new", "profiler::_record_function_exit"}
ALLOWED |= {"aten::_amp_update_scale_", "aten::_amp_foreach_non_finite_check_and_unscale_"}


def _ops(log: OpLog) -> Counter[str]:
    """How often each op ran. A bucket's are the compiled library's own, once they are prepared."""
    ops: Counter[str] = Counter()
    for name, count in log.names.items():
        ops[name.replace("zero_kernels_C::", "zero_kernels::")] += count
    return ops


def _watched_step(
    rank: int, world_size: int, stage: int, dtype: torch.dtype, scaled: bool, clip: str, micro: int
) -> set[str]:
    """Names of the ops of one steady step; raises HostRead where a value is read."""
    params = make_parameters(SHAPES, dtype)
    opt = zero_optim.ShardedAdamW(
        params,
        stage=stage,
        bucket_cap_mb=TINY_CAP_MB,
        max_grad_norm=1.0 if clip == "argument" else None,
        check_replicas_every=1 if clip == "none" else None,
    )
    scaler = zero_optim.GradScaler(init_scale=4.0, enabled=scaled)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1))

    tokens = torch.full((), 3.0)

    def one_step(step: int) -> None:
        for index in range(micro):
            with maybe_no_sync(opt, index < micro - 1):
                scaler.scale(losses[index]).backward()
            if clip == "counts":
                opt.count(tokens)
        if clip.startswith("call"):
            scaler.unscale_(opt)
            opt.clip_grad_norm_(1.0, 3.0 if clip == "call, of any p" else 2.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scheduler.step()

    for step in range(3):
        losses = [linear_loss(params, make_gradients(params, rank, step, index)) for index in range(micro)]
        one_step(step)
    losses = [linear_loss(params, make_gradients(params, rank, 3, index)) for index in range(micro)]
    with OpLog() as log, no_host_reads():
        one_step(3)
    opt.close()
    return set(_ops(log))


CASES = [
    (torch.float16, True, "call", 2),
    (torch.float16, True, "argument", 1),
    (torch.bfloat16, False, "call", 1),
    (torch.bfloat16, False, "none", 2),
    (torch.float16, True, "counts", 2),
    (torch.float32, False, "argument", 1),
    (torch.float16, True, "call, of any p", 1),
]


def _watched_steps(rank: int, world_size: int) -> dict[str, set[str]]:
    return {
        f"stage {stage}, {case}": _watched_step(rank, world_size, stage, *case) for stage in (0, 1, 2) for case in CASES
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_reads_nothing_on_the_host(world_size):
    for found in run_ranks(world_size, _watched_steps):
        for case, names in found.items():
            assert names <= ALLOWED, f"{case}: {sorted(names - ALLOWED)}"
            assert "zero_kernels::foreach_step" in names
            assert ("c10d::allreduce_" in names) == (world_size > 1)


def _launches(rank: int, world_size: int, shapes: tuple[tuple[int, ...], ...], stage: int) -> dict[str, int]:
    """Kernel launches and collectives of a steady step."""
    params = make_parameters(shapes, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=25.0)
    for step in range(3):
        loss = linear_loss(params, make_gradients(params, rank, step))
        if step == 2:
            with OpLog() as log:
                loss.backward(inputs=params) if world_size == 0 else loss.backward()
                opt.step()
        else:
            loss.backward()
            opt.step()
        opt.zero_grad()
    buckets = opt.stats()["buckets"]
    opt.close()
    return {"buckets": buckets, **{n: c for n, c in _ops(log).items() if n.split("::")[0] in ("zero_kernels", "c10d")}}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_launches_follow_the_buckets_not_the_parameters(stage):
    """Eight times the parameters of the same total size, and not one launch more."""
    few, many = ((8, 1536),) * 8, ((1536,),) * 64
    for world_size in (1, 2):
        of_few, of_many = (run_ranks(world_size, _launches, shapes, stage) for shapes in (few, many))
        for rank, (result_few, result_many) in enumerate(zip(of_few, of_many, strict=True)):
            assert result_few == result_many
            assert result_few["buckets"] == 4
            # Of small shards one call updates several: here of half a bucket all four, of a whole one two.
            assert result_few["zero_kernels::foreach_step"] == (2 if world_size == 1 or stage == 0 else 1)
            assert result_few["zero_kernels::pack"] == 4
            # At stage 0 all ranks have the same gradients, and the first reads them for all.
            assert result_few.get("zero_kernels::grad_stats", 0) == (rank == 0 or stage > 0)
