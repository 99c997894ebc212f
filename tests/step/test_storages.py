"""Nothing is allocated after the second step: the optimizer's storages, walked through its objects, stay the same."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import zero_optim
from guards import OpLog, storages_of
from harness import run_ranks
from training_cases import ROW, TINY_CAP_MB, linear_loss, make_gradients, make_parameters, maybe_no_sync

# Aligned sizes, all larger than the small tensors (norms, coefficients, hyper tables) that a step may make.
SHAPES = ((24 * ROW,), (12, ROW), (2, 6, ROW), (36, ROW))
STEPS = 6


@dataclass(frozen=True)
class Run:
    stage: int
    dtype: torch.dtype = torch.bfloat16
    micro: int = 1
    no_sync: bool = True
    overlap: bool = True
    reduce_dtype: torch.dtype | None = None
    scaled: bool = False


def _watch(rank: int, world_size: int, run: Run) -> list[dict[str, dict[int, int]]]:
    """Storages at three points of each step; ``backward`` without the gradients themselves."""
    params = make_parameters(SHAPES, run.dtype)
    opt = zero_optim.ShardedAdamW(
        params,
        stage=run.stage,
        bucket_cap_mb=TINY_CAP_MB,
        overlap_grad_reduce=run.overlap,
        grad_reduce_dtype=run.reduce_dtype,
        max_grad_norm=1.0,
    )
    scaler = zero_optim.GradScaler(init_scale=4.0, enabled=run.scaled)
    points = []
    for step in range(STEPS):
        for micro in range(run.micro):
            with maybe_no_sync(opt, run.no_sync and micro < run.micro - 1):
                scaler.scale(linear_loss(params, make_gradients(params, rank, step, micro))).backward()
        gradients = storages_of([p.grad for p in params])
        seen = {"backward": {a: n for a, n in storages_of(opt).items() if a not in gradients}}
        scaler.step(opt)
        scaler.update()
        seen["step"] = {a: n for a, n in storages_of(opt).items() if a not in gradients}
        opt.zero_grad()
        seen["zero_grad"] = storages_of(opt)
        points.append(seen)
    opt.close()
    return points


def _watch_all(rank: int, world_size: int, runs: list[Run]) -> list[list[dict[str, dict[int, int]]]]:
    return [_watch(rank, world_size, run) for run in runs]


RUNS = [
    *[Run(stage, dtype) for stage in (0, 1, 2) for dtype in (torch.float32, torch.bfloat16)],
    *[Run(stage, micro=2, no_sync=no_sync) for stage in (0, 1, 2) for no_sync in (True, False)],
    *[Run(stage, torch.float16, scaled=True) for stage in (0, 1, 2)],
    Run(1, overlap=False),
    Run(2, reduce_dtype=torch.float32),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_storages_stay_from_the_second_step_on(world_size):
    for results in run_ranks(world_size, _watch_all, RUNS):
        for run, points in zip(RUNS, results, strict=True):
            assert len(points[1]["step"]) >= 3, "the walk finds state"
            for step in range(2, STEPS):
                for point in ("step", "zero_grad"):
                    assert points[step][point] == points[1][point], f"{run}: after {point} of step {step}"
                grown = points[step]["backward"].items() - points[1]["step"].items()
                assert not grown, f"{run}: in backward of step {step}: {sorted(size for _, size in grown)} bytes"


def _fresh(rank: int, world_size: int, run: Run) -> list[tuple[str, int]]:
    """Ops of a steady ``step`` that returned new storage of at least the smallest shard's size."""
    params = make_parameters(SHAPES, run.dtype)
    opt = zero_optim.ShardedAdamW(params, stage=run.stage, bucket_cap_mb=TINY_CAP_MB, overlap_grad_reduce=run.overlap)
    smallest = 12 * ROW * 2 // 2
    found: list[tuple[str, int]] = []
    for step in range(4):
        loss = linear_loss(params, make_gradients(params, rank, step))
        known = storages_of(opt)
        loss.backward()
        gradients = storages_of([p.grad for p in params])
        with OpLog() as log:
            opt.clip_grad_norm_(1.0)
            opt.step()
        opt.zero_grad()
        found = [
            (name, size) for name, at, size in log.allocations if size >= smallest and at not in {**known, **gradients}
        ]
    opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("run", [Run(0), Run(1), Run(2), Run(1, overlap=False), Run(2, torch.float32)], ids=str)
def test_a_step_makes_no_temporary_of_a_shards_size(run, world_size):
    assert run_ranks(world_size, _fresh, run) == [[]] * world_size
