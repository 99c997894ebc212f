"""The host's cost of a bucket, by part: packing its gradients, updating its shard, gathering its parameters."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from zero_optim import ShardedAdamW
from zero_optim.bench.cases import HYPER
from zero_optim.bench.timing import HostClock, Job, Spread, interleaved
from zero_optim.step.workplace import Coefficients

from zero_kernels import ROW

BUCKETS, GRADIENTS = 64, 12
RANKS = 8
CPU = torch.device("cpu")
PARTS = ("pack", "adam_step", "all_gather")


def measure(rounds: int, device: torch.device = CPU) -> dict[str, float]:
    """Measure the thread's microseconds for each of ``PARTS``, within a process group of ``RANKS``.

    Kernels run, but take next to no time: each gradient is one row.
    """
    parameters = [
        nn.Parameter(torch.zeros(ROW, dtype=torch.bfloat16, device=device)) for _ in range(BUCKETS * GRADIENTS)
    ]
    cap_mb = GRADIENTS * ROW * torch.bfloat16.itemsize / 2**20
    opt = ShardedAdamW(parameters, stage=2, bucket_cap_mb=cap_mb, **HYPER)
    clock = HostClock(time.thread_time)
    laps = interleaved({"parts": _job(opt)}, clock, rounds)["parts"]
    opt.close()
    medians = [Spread.of(lap).ms * 1e3 / BUCKETS for lap in zip(*laps, strict=True)]
    return {part: round(microseconds, 2) for part, microseconds in zip(PARTS, medians, strict=True)}


def _job(opt: ShardedAdamW) -> Job:
    engine = opt.engine
    buckets, exchange = engine.reducer.buckets, engine.exchange
    assert len(buckets) == BUCKETS
    gradients: list[list[tuple[int, Tensor]]] = [
        [(index, torch.ones_like(parameter)) for index, parameter in enumerate(bucket.params)] for bucket in buckets
    ]
    full = torch.empty(buckets[0].layout.numel, dtype=torch.bfloat16, device=engine.sharding.device)
    by = Coefficients(
        engine.hyper.tables, None, None, exchange.found_inf, exchange.nonfinite.marks, exchange.used, engine.hyper.steps
    )

    def pack() -> None:
        for bucket, sources in zip(buckets, gradients, strict=True):
            bucket.pack(sources, full, 1 / RANKS)

    def update() -> None:
        for _ in engine.states.update(by):
            pass

    def gather() -> None:
        for bucket in buckets:
            bucket.unshard()
        for bucket in buckets:
            bucket.wait_for_parameters()

    return [pack, update, gather]
