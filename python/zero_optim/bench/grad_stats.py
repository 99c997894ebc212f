"""``grad_stats`` against the two passes by which torch's scaler and clipping learn the same."""

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
    """Compute the 2-norm, [] fp32. Unlike ``grad_stats`` it does not count non-finite values."""
    return torch.linalg.vector_norm(shard, dtype=torch.float32)


def pipeline(shard: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Make the check of ``GradScaler.unscale_`` (with a scale of 1, so that gradients stay), then the norm. For bf16 on
    CUDA torch has no such check: ``isfinite`` takes its place."""
    one = torch.ones(1, device=shard.device)
    found_inf = torch.zeros(1, device=shard.device)
    if shard.is_cuda and shard.dtype == torch.bfloat16:
        return lambda: (norm(shard), shard.isfinite().all())

    def run() -> tuple[Tensor, Tensor]:
        found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_([shard], found_inf, one)
        return norm(shard), found_inf

    return run
