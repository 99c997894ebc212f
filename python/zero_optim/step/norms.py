"""The p-norm of gradients that lie in parts, on several ranks, without overflow or underflow on the way.

|g|^64 leaves fp32 where |g| is above 4 or below 0.2, and float64 not much later. So no power of a gradient is added up
as it is. A norm travels as two numbers, ``largest`` and ``total``, where ``norm = largest * total ** (1 / p)``::

    of a gradient        its largest |g|, and the sum of (|g| / largest)^p: each term at most 1, one of them 1
    of several of them   the largest of these, and the sum of total * (largest_i / largest)^p

A norm of 1 or 2 is what a kernel has added up in fp32; that of inf is ``largest`` by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import Comm

KERNEL_NORMS = (1.0, 2.0, math.inf)
"""Norms that ``grad_stats`` takes in one read, in one order of additions on every backend."""

_CHUNK = 2**22  # elements handled at once: bounds what a power takes to some 100 MB


def root(power_sum: Tensor, norm_type: float) -> Tensor:
    """Make the norm of the sum of |g|^p; for inf, of the largest |g|."""
    return power_sum.clone() if norm_type == math.inf else power_sum.pow(1.0 / norm_type)


@dataclass(frozen=True)
class Norms:
    """Norms of several parts: ``largest * total ** (1 / p)`` each; both [parts] float64."""

    largest: Tensor
    total: Tensor

    @classmethod
    def of(cls, gradients: Sequence[Tensor], norm_type: float) -> Norms:
        """Measure flat fp16, bf16 or fp32 tensors, at least one."""
        in_kernel = norm_type in KERNEL_NORMS
        stats = torch.ops.zero_kernels.grad_stats(gradients, norm_type if in_kernel else math.inf)[:, 0].double()
        if in_kernel:
            largest = root(stats, norm_type)
            return cls(largest, torch.ones_like(largest))
        divisors = _divisor(stats)
        return cls(stats, torch.stack([_powers(g, divisors[i], norm_type) for i, g in enumerate(gradients)]))

    def together(self, norm_type: float) -> Norms:
        """Combine all parts into one: [1] each."""
        largest = self.largest.amax(0, keepdim=True)
        total = self.total * (self.largest / _divisor(largest)) ** norm_type
        return Norms(largest, total.sum(0, keepdim=True))

    def norm(self, norm_type: float) -> Tensor:
        """[parts] float64."""
        return self.largest * self.total ** (1.0 / norm_type)


def norms_over(comm: Comm, here: Norms | None, norm_type: float, device: torch.device) -> Norms:
    """Collective: one small all-reduce. Combine the parts of all ranks of ``comm`` into one; ``here`` None: no parts.

    Each rank has two places of its own in the vector, to which the others add 0: parts can be scaled, and added up,
    only once the largest is known.
    """
    vector = torch.zeros(2, comm.world_size, dtype=torch.float32, device=device)
    if here is not None:
        one = here.together(norm_type)
        vector[0, comm.rank : comm.rank + 1].copy_(one.largest)
        vector[1, comm.rank : comm.rank + 1].copy_(one.total)
    comm.exchange(vector)
    largest, total = vector.double()
    return Norms(largest, total).together(norm_type)


def _powers(gradient: Tensor, divisor: Tensor, norm_type: float) -> Tensor:
    """[] float64: the sum of (|g| / divisor)^p."""
    sums = [(part.double().abs() / divisor).pow(norm_type).sum() for part in gradient.split(_CHUNK)]
    return torch.stack(sums).sum()


def _divisor(largest: Tensor) -> Tensor:
    """``largest``, by which parts can be divided: 1 where all of them are 0, or one is not finite."""
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
