"""Where the ops run, how tensors get there and back, and when two results count as the same.

`ZERO_KERNELS_GPU_TESTS_ON=cpu` rehearses tests of a GPU on the CPU, as far as they need none: the same functions, on
the backends that a CPU has. `ZERO_KERNELS_GPU_TESTS_SEED` repeats a run's random numbers; else each draws its own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gpu_ranks
import pytest
import torch
from interpreter import in_interpreter
from kernel_cases import ISAS, awkward, backend, same_bits
from torch import Tensor

import zero_kernels

DEVICE = os.environ.get("ZERO_KERNELS_GPU_TESTS_ON", "cuda")
ON_GPU = DEVICE == "cuda"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SEED = int(os.environ.get("ZERO_KERNELS_GPU_TESTS_SEED", random.SystemRandom().randrange(2**31)))
GUARD = 40  # elements behind every tensor that nothing may write to
SENTINEL = 77.0  # exact in every dtype
ADAM_NAMES = ("master", "exp_avg", "exp_avg_sq", "param_out", "nonfinite_slots")  # what adam_step writes


@dataclass(frozen=True)
class Place:
    """A backend, and the device that its tensors are on. `isa`: of the compiled library; empty: the best."""

    backend: str
    device: str
    isa: str = ""

    def __str__(self) -> str:
        return self.isa or (self.backend if self.backend == self.device else f"{self.backend} on {self.device}")


SPECIFICATION = Place("reference", "cpu")
ON_CUDA = ("cuda", "triton", "reference")

if ON_GPU:
    PLACES = (*(Place(name, "cuda") for name in ON_CUDA), Place("cpu", "cpu"))
else:
    PLACES = tuple(Place(name, "cpu") for name in zero_kernels.available_backends("cpu"))

KERNELS = tuple(place for place in PLACES if place.device == DEVICE and place.backend != "reference") or PLACES
"""The backends that have kernels for the device under test."""

RUNNERS = (
    *(pytest.param(Place("cpu", "cpu", isa), id=isa) for isa in ISAS),
    pytest.param(Place("triton", "cpu"), id="triton interpreted", marks=pytest.mark.kernels),
    *(pytest.param(Place(name, "cuda"), id=f"{name} on cuda", marks=pytest.mark.gpu) for name in ON_CUDA),
)
"""All that have the bits of the specification: each instruction set, Triton's interpreter, and what a GPU has."""


def everywhere(test: Callable[..., None]) -> Callable[..., None]:
    """Run a module-level test on every runner, as its argument `place`; the interpreter's in a process of its own."""

    @functools.wraps(test)
    def run(place: Place, **kwargs: Any) -> None:
        if place.backend == "triton" and place.device == "cpu" and not INTERPRETED:
            if importlib.util.find_spec("triton") is None:
                pytest.skip("triton is not installed")
            in_interpreter(test, place=place, **kwargs)
        else:
            test(place=place, **kwargs)

    return pytest.mark.parametrize("place", RUNNERS)(run)


on_kernels = pytest.mark.parametrize("place", KERNELS, ids=str)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="the CPU has no CUDA graphs, streams or allocator statistics")


class Uncalibrated(UserWarning):
    """Something is beyond a tolerance that was never measured on a GPU."""


def within(right: bool, told: str) -> None:
    """For tolerances that are guesses on a GPU: there it is reported, and on a CPU the test fails."""
    if not right and ON_GPU:
        warnings.warn(Uncalibrated(told), stacklevel=2)
    elif not right:
        raise AssertionError(told)


def why_no_device() -> str | None:
    """None where these tests can run, else the reason in words."""
    if ON_GPU and not torch.cuda.is_available():
        return "no CUDA device" if torch.version.cuda else "no CUDA device: this torch is built without CUDA"
    return None


def why_not_nccl_ranks(world_size: int) -> str | None:
    """None where so many NCCL ranks can run here, or the CPU rehearses them under gloo; else the reason in words."""
    if not ON_GPU:
        return None
    version = gpu_ranks.loaded() or torch.cuda.nccl.version()[:3]
    return gpu_ranks.why_not_on_one_gpu(world_size, torch.cuda.device_count(), version)


def sizes_at(place: Place, sizes: Iterable[int], slow: int = 5_000) -> list[int]:
    """The sizes; up to `slow` for Triton's interpreter, which takes seconds for a million elements."""
    limited = place.backend == "triton" and INTERPRETED
    return [size for size in sizes if not limited or size <= slow]


@functools.lru_cache(maxsize=512)
def values(numel: int, dtype: torch.dtype, which: int) -> Tensor:
    """Awkward values of this run's seed on the CPU, shared: never write to them. `which` tells one from another."""
    return awkward(numel, dtype, SEED + which)


def finite(x: Tensor) -> Tensor:
    """`x` with everything that would make a sum inf or NaN replaced by 1."""
    return torch.where(x.isfinite() & (x.abs() < 1e12), x, torch.ones_like(x))


def put(x: Tensor, place: Place, offset: int = 0) -> Tensor:
    """A copy of `x` on the place's device that starts `offset` elements into an allocation; sentinels surround it."""
    base = torch.full((offset + x.numel() + GUARD,), int(SENTINEL), dtype=x.dtype, device=place.device)
    view = base[offset : offset + x.numel()]
    view.copy_(x.reshape(-1))
    return view.view(x.shape)


def fetch(x: Tensor) -> Tensor:
    """What `put` brought there, on the CPU; raises AssertionError when something was written around it."""
    base, start = x._base, x.storage_offset()
    if base is None:
        raise AssertionError("fetch takes back what put has made")
    around = torch.cat((base[:start], base[start + x.numel() :]))
    if not bool((around == SENTINEL).all()):
        raise AssertionError(f"elements around a {x.dtype} tensor of {x.numel()} were written")
    return x.detach().cpu()


def difference(got: Sequence[Tensor], want: Sequence[Tensor], names: Sequence[str]) -> str:
    """Empty when all have the same bits, a NaN being any NaN; else the first that differs, where and how often."""
    for name, a, b in zip(names, got, want, strict=True):
        if not same_bits(a, b):
            return f"{name} {_first_difference(a, b)}"
    return ""


def _first_difference(got: Tensor, want: Tensor) -> str:
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"is {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    a, b = got.reshape(-1), want.reshape(-1)
    off = [i for i in range(len(a)) if not same_bits(a[i : i + 1], b[i : i + 1])] if len(a) < 5_000 else None
    if off is None:
        signs = a.signbit() != b.signbit() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
        off = ((a != b) & ~(a.isnan() & b.isnan()) | signs).nonzero().flatten().tolist()
    at = off[0]
    return f"differs in {len(off)} of {len(a)} elements, first [{at}]: {a[at].item()!r} instead of {b[at].item()!r}"


def check(got: Sequence[Tensor], want: Sequence[Tensor], names: Sequence[str], what: object) -> None:
    """Raise AssertionError, with the seed that repeats it, unless all have the same bits."""
    found = difference(got, want, names)
    if found:
        raise AssertionError(f"{what}: {found} (ZERO_KERNELS_GPU_TESTS_SEED={SEED})")


def using(place: Place, op: Callable[[], object]) -> None:
    """Run `op` on the place's backend."""
    with backend(place.isa or place.backend):
        op()


@functools.cache
def four_slots() -> Tensor:
    """A hyper table of four slots: decoupled, with decay and clipped, L2 that maximizes, and one that is not active."""
    with zero_kernels.use_backend("reference"):
        table = zero_kernels.hyper_table(
            [1e-3, 1e-2, 0.1, 1.0],
            ([0.9, 0.3, 0.5, 0.9], [0.999, 0.99, 0.9, 0.95]),
            [1e-8, 1e-6, 0.0, 1e-8],
            [0.0, 0.1, 0.1, 0.2],
            [1, 2, 1000, 3],
            decoupled=[True, True, False, True],
            active=[True, True, True, False],
            maximize=[False, False, True, False],
        )
    table[:, zero_kernels.HYPER_COLUMNS.index("grad_factor")] *= torch.tensor([1.0, 0.37, 0.7, 0.0])
    return table
