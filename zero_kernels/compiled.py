"""The compiled CPU library: found beside this file, loaded once, never built here."""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_kernels import reference

LIBRARY = Path(__file__).parent / ("libzero_kernels_cpu" + (".dylib" if sys.platform == "darwin" else ".so"))
BUILD_ERROR = Path(__file__).parent / "build_error.txt"


@dataclass(frozen=True)
class Status:
    """What `zero-optim doctor` shows about the compiled library."""

    loaded: bool
    path: str | None
    isa: str | None  # instruction set in use
    isas: tuple[str, ...]  # usable on this processor, best first
    build_error: str | None  # first error of the build: the command and the compiler's words
    load_error: str | None


@functools.cache
def _load_error() -> str | None:
    """Load the library, once; the reason in words when it can't be."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} is not there: the package was installed without building it"
    try:
        torch.ops.load_library(LIBRARY)
    except (OSError, RuntimeError) as error:
        return f"{LIBRARY.name} can't be loaded: {error}"
    return None


def why_unusable() -> str | None:
    """None when the library is loaded, else one line in words."""
    return _load_error()


def status() -> Status:
    """The state of the compiled library, with the errors that its build or its loading kept."""
    load_error, isa, isas = _load_error(), None, ()
    loaded = load_error is None
    if loaded:
        isas = tuple(torch.ops.zero_kernels_C.isas().split(","))
        try:
            isa = torch.ops.zero_kernels_C.isa()
        except RuntimeError as error:  # ZERO_KERNELS_ISA names one that this processor lacks
            load_error = str(error)
    return Status(
        loaded=loaded,
        path=str(LIBRARY) if loaded else None,
        isa=isa,
        isas=isas,
        build_error=BUILD_ERROR.read_text() if BUILD_ERROR.exists() else None,
        load_error=load_error,
    )


def use_isa(name: str | None) -> None:
    """Force an instruction set of `status().isas`; None goes back to the best. ZERO_KERNELS_ISA does it at load.

    Raises RuntimeError, naming the usable ones, for any other name.
    """
    torch.ops.zero_kernels_C.use_isa(name or "")


def _grad_stats(shard: torch.Tensor, norm_type: float) -> torch.Tensor:
    if norm_type in (1.0, 2.0, math.inf):
        return torch.ops.zero_kernels_C.grad_stats(shard, norm_type)
    return reference.grad_stats(shard, norm_type)


def _adam_step(*args: torch.Tensor | None) -> None:
    torch.ops.zero_kernels_C.adam_step(*args)


def _pack(
    grads: Sequence[torch.Tensor],
    offsets: Sequence[int],
    bucket: torch.Tensor,
    scale: float,
    nonfinite: torch.Tensor | None,
) -> None:
    torch.ops.zero_kernels_C.pack(grads, offsets, bucket, scale, nonfinite)


def _unpack(bucket: torch.Tensor, offsets: Sequence[int], grads: Sequence[torch.Tensor], scale: float) -> None:
    torch.ops.zero_kernels_C.unpack(bucket, offsets, grads, scale)


OPS: dict[str, Callable[..., Any]] = {
    "adam_step": _adam_step,
    "pack": _pack,
    "unpack": _unpack,
    "grad_stats": _grad_stats,
}
