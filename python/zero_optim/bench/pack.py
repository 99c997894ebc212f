"""``pack`` against torch's own ways to bring many gradients into one flat bucket. All give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

import zero_kernels

from .case import COPY, TORCH, Case, Setting, backend_jobs, copy_job

BYTES = 4  # 2 read, 2 written
SCALE = 0.5  # 1/N of two ranks
WIDEST = 2048


def make_case(setting: Setting) -> Case:
    grads = [setting.random(numel) for numel in gradient_numels(setting.numel)]
    bucket = torch.empty(setting.numel, device=setting.device, dtype=setting.torch_dtype)
    jobs = backend_jobs(setting, ours(grads, bucket, SCALE))
    jobs[TORCH] = [pipeline(grads, bucket, SCALE)]
    jobs |= {
        "foreach_copy": [foreach_copy(grads, bucket)],
        "cat": [lambda: torch.cat(grads, out=bucket)],
        COPY: copy_job(setting, BYTES),
    }
    return Case("pack", setting, BYTES, COPY, jobs, ["foreach_copy", "cat"])


def gradient_numels(numel: int) -> list[int]:
    """Give the sizes of gradients of transformer blocks, ``numel`` in all: four matrices and two vectors a block.

    The width is the largest power of two, up to ``WIDEST``, that gives at least one block.
    """
    width = next((2**k for k in range(WIDEST.bit_length() - 1, 3, -1) if 12 * 4**k + 2 * 2**k <= numel), 0)
    if not width:
        return [numel]
    block = [width, 3 * width**2, width**2, width, 4 * width**2, 4 * width**2]
    blocks, rest = divmod(numel, sum(block))
    return block * blocks + [rest] * (rest > 0)


def ours(grads: list[Tensor], bucket: Tensor, scale: float) -> Callable[[], None]:
    offsets = [0, *accumulate(grad.numel() for grad in grads)][: len(grads)]
    return lambda: zero_kernels.pack(grads, offsets, bucket, scale)


def foreach_copy(grads: list[Tensor], bucket: Tensor) -> Callable[[], None]:
    views = list(bucket.split([grad.numel() for grad in grads]))
    return lambda: torch._foreach_copy_(views, grads)


def pipeline(grads: list[Tensor], bucket: Tensor, scale: float) -> Callable[[], None]:
    """Do all that ``pack`` does, in two passes: gather, then scale."""
    gather = foreach_copy(grads, bucket)

    def run() -> None:
        gather()
        bucket.mul_(scale)

    return run
