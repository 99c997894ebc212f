"""Inputs that hurt, the backends to compare, and what it means for two tensors to hold the same bits."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import zero_kernels
from zero_kernels import compiled

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SIZES = (0, 1, 7, 127, 128, 129, 4095, 4097, 1_000_003)
ISAS = compiled.status().isas
BITS = {2: torch.int16, 4: torch.int32}


@contextmanager
def backend(name: str) -> Iterator[None]:
    """`reference`, or the cpu backend on the instruction set of that name."""
    if name == "reference":
        with zero_kernels.use_backend("reference"):
            yield
        return
    compiled.use_isa(name)
    try:
        with zero_kernels.use_backend("cpu"):
            yield
    finally:
        compiled.use_isa(None)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch's parallel loops on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.lru_cache(maxsize=32)
def awkward(numel: int, dtype: torch.dtype, seed: int, offset: int = 0) -> Tensor:
    """Values over all magnitudes, a tenth of them special, starting `offset` elements into an allocation.

    Made once and shared: clone it before writing.
    """
    generator = torch.Generator().manual_seed(seed)
    total = numel + offset
    exponents = torch.randint(-30, 20, (total,), generator=generator).float()
    x = (torch.randn(total, generator=generator) * torch.exp2(exponents)).to(dtype)
    info = torch.finfo(dtype)
    specials = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny / 2, info.tiny * info.eps]
    specials += [math.inf, -math.inf, math.nan]
    special = torch.tensor(specials, dtype=torch.float64).to(dtype)
    where = torch.rand(total, generator=generator) < 0.1
    choice = torch.randint(0, len(specials), (total,), generator=generator)
    return torch.where(where, special[choice], x)[offset:]


def dominated(numel: int, seed: int) -> Tensor:
    """fp32 values from 0 to 1, of which every 1024th outweighs the rest. So a sum tells the order of those."""
    values = torch.rand(numel, generator=torch.Generator().manual_seed(seed))
    return torch.where(torch.arange(numel) % 1024 == 0, values, values * 2.0**-30)


def at_offset(x: Tensor, offset: int) -> Tensor:
    """A copy of flat `x` that starts `offset` elements into its allocation."""
    return torch.cat([x.new_zeros(offset), x])[offset:]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits; a NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    differs = a.view(BITS[a.element_size()]) != b.view(BITS[b.element_size()])
    return not (differs & ~(a.isnan() & b.isnan())).any()
