"""``grad_stats`` against the two passes that torch's scaler and clipping make for the same knowledge."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import zero_kernels

from .case import COPY, TORCH, Case, Setting, backend_jobs, copy_job

BYTES = 2


def make_case(setting: Setting) -> Case:
    shard = setting.random(setting.numel)
    jobs = backend_jobs(setting, lambda: zero_kernels.grad_stats(shard))
    jobs |= {TORCH: [pipeline(shard)], "norm": [lambda: norm(shard)], COPY: copy_job(setting, BYTES)}
    return Case("grad_stats", setting, BYTES, COPY, jobs, ["norm"])


def norm(shard: Tensor) -> Tensor:
    """[] fp32, and no word on non-finite values: less than ``grad_stats`` tells."""
    return torch.linalg.vector_norm(shard, dtype=torch.float32)


def pipeline(shard: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """``GradScaler.unscale_``'s check (with a scale of 1, so that the gradients stay), then the norm. Of bf16 torch has
    no such check on CUDA: ``isfinite`` takes its place."""
    one = torch.ones(1, device=shard.device)
    found_inf = torch.zeros(1, device=shard.device)
    if shard.is_cuda and shard.dtype == torch.bfloat16:
        return lambda: (norm(shard), shard.isfinite().all())

    def run() -> tuple[Tensor, Tensor]:
        found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_([shard], found_inf, one)
        return norm(shard), found_inf

    return run
