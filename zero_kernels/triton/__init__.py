"""The Triton backend: the ops of `zero_kernels.reference` as kernels for NVIDIA GPUs, the same to the last bit.

Under TRITON_INTERPRET=1 Triton runs them in Python on CPU tensors instead, which is for tests.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

_import_error: str | None = None
OPS: dict[str, Callable[..., Any]] = {}
"""The ops by name; empty when triton can't be imported."""

try:
    from triton.runtime.driver import driver

    from zero_kernels.triton import common, ema, grad_stats, hyper_table, pack, step, symmetric  # noqa: F401  (for who imports it from here)
except (ImportError, AttributeError) as error:  # the latter from an older triton
    _import_error = f"triton can't be imported or is too old: {error}"
else:
    OPS = {
        "foreach_step": step.foreach_step,
        "ema": ema.ema,
        "pack": pack.pack,
        "unpack": pack.unpack,
        "grad_stats": grad_stats.grad_stats,
        "hyper_table": hyper_table.hyper_table,
    }

OLDEST_ARCH = 80  # the first with casts to bf16


@functools.cache
def why_unusable() -> str | None:
    """None when the kernels can run, else the reason in words. The first call may build Triton's driver (seconds)."""
    if _import_error is not None:
        return _import_error
    if common.INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        target = driver.active.get_current_target()
    except Exception as error:  # Triton builds its driver with a C compiler, and raises whatever went wrong
        return f"triton can't drive the GPU: {error}".splitlines()[0]
    if target.backend != "cuda":
        return f"not tried on {target.backend}, where the bits may differ"
    if target.arch < OLDEST_ARCH:
        return f"needs compute capability {OLDEST_ARCH / 10}, the GPU has {target.arch / 10}"
    return None
