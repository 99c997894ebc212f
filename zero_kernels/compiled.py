"""The compiled libraries, one for CPU and one for CUDA: found beside this file, loaded once, never built here."""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_kernels import reference

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Status:
    """The facts about a compiled library that `zero-optim doctor` shows."""

    loaded: bool
    path: str | None
    build_error: str | None  # why the build left it out, or its first error: the command and the compiler's words
    load_error: str | None
    isa: str | None = None  # of the CPU library: the instruction set in use
    isas: tuple[str, ...] = ()  # usable on this processor, best first
    archs: str | None = None  # of the CUDA library: the architectures that it was built for


def library(name: str) -> Path:
    """Where the library of that name, cpu or cuda, lies if it was built."""
    return FOLDER / f"libzero_kernels_{name}{'.dylib' if sys.platform == 'darwin' else '.so'}"


def _build_error(name: str) -> str | None:
    report = FOLDER / f"build_error_{name}.txt"
    return report.read_text() if report.exists() else None


@functools.cache
def why_unusable(name: str) -> str | None:
    """None when the library, cpu or cuda, is loaded and of use, else the reason in words. Loads it, once."""
    if name == "cuda":
        reason = _why_no_cuda() or why_unusable("cpu")  # whose library defines the schemas
        if reason is not None:
            return reason
    path = library(name)
    if not path.exists():
        return f"{path.name} is not there: the package was installed without building it"
    try:
        torch.ops.load_library(path)
        return _why_not_here() if name == "cuda" else None
    except (OSError, RuntimeError) as error:
        return f"{path.name} can't be loaded: {error}"
    except AttributeError as error:
        return f"{path.name} and {library('cpu').name} are of different builds ({error}): install again"


def _why_no_cuda() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _why_not_here() -> str | None:
    """The reason when the driver is too old for the library, or the library holds no code for one of the devices."""
    reason = torch.ops.zero_kernels_C.cuda_problem()
    if reason:
        return reason
    built = torch.ops.zero_kernels_C.cuda_archs()
    for index in range(torch.cuda.device_count()):
        if not runs_on(built, torch.cuda.get_device_capability(index)):
            major, minor = torch.cuda.get_device_capability(index)
            wanted = f"TORCH_CUDA_ARCH_LIST={major}.{minor}"
            remedy = f"install again with {wanted}, or hide the device with CUDA_VISIBLE_DEVICES"
            return f"built for {built}, but cuda:{index} is {major}.{minor}: {remedy}"
    return None


def runs_on(built: str, capability: tuple[int, int]) -> bool:
    """Whether code built for e.g. "8.0 9.0 10.0+PTX" runs on a device of that compute capability.

    Machine code runs on the same major version from its own minor version on; PTX on all that is not older.
    """
    for name in built.split():
        version, _, ptx = name.partition("+")
        major, minor = map(int, version.rstrip("af").split("."))
        if capability[0] == major and capability[1] >= minor or (ptx and capability >= (major, minor)):
            return True
    return False


def status(name: str = "cpu") -> Status:
    """The state of the library cpu or cuda, with the errors that its build or its loading kept."""
    load_error = why_unusable(name)
    path = str(library(name)) if library(name).exists() else None
    if load_error is not None:
        return Status(loaded=False, path=path, build_error=_build_error(name), load_error=load_error)
    if name == "cuda":
        archs = torch.ops.zero_kernels_C.cuda_archs()
        return Status(loaded=True, path=path, build_error=None, load_error=None, archs=archs)
    isa = None
    try:
        isa = torch.ops.zero_kernels_C.isa()
    except RuntimeError as error:  # ZERO_KERNELS_ISA names one that this processor lacks
        load_error = str(error)
    isas = tuple(torch.ops.zero_kernels_C.isas().split(","))
    return Status(loaded=True, path=path, build_error=None, load_error=load_error, isa=isa, isas=isas)


def use_isa(name: str | None) -> None:
    """Force an instruction set of `status().isas`; None goes back to the best. ZERO_KERNELS_ISA does it at load.

    Raises RuntimeError, naming the usable ones, for any other name.
    """
    torch.ops.zero_kernels_C.use_isa(name or "")


def overload(op: str) -> Callable[..., Any]:
    """The library's own op, as torch has it. Looked up at each call: `benchmarks/bench_scale.py` puts others there."""
    return getattr(torch.ops.zero_kernels_C, op).default


def _grad_stats(shards: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if norm_type in (1.0, 2.0, math.inf):
        return overload("grad_stats")(shards, norm_type)
    return reference.grad_stats(shards, norm_type)


def _run(op: str, *args: Any) -> None:
    overload(op)(*args)


# Both libraries define the same ops, each for the tensors of its device.
OPS: dict[str, Callable[..., Any]] = {op: functools.partial(_run, op) for op in reference.OPS}
OPS["grad_stats"] = _grad_stats
