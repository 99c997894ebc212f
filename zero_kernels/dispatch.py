"""Chooses the backend that runs an op. The registry is data: a row a backend, in order of preference."""

import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from zero_kernels import compiled, reference

ENVIRONMENT = "ZERO_KERNELS_BACKEND"

OpTable = Mapping[str, Callable[..., Any]]


class BackendError(RuntimeError):
    """A forced backend is unknown, or unusable for the tensors at hand."""


@dataclass(frozen=True)
class Backend:
    """One implementation of all the ops."""

    name: str
    device_types: frozenset[str] | None  # None: every device
    ops: Callable[[], OpTable]
    why_unusable: Callable[[], str | None]


# Triton's interpreter, which takes CPU tensors, is chosen when triton is imported.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
_TRITON_DEVICES = frozenset({"cpu"} if _INTERPRETED else {"cuda"})


def _triton_ops() -> OpTable:
    from zero_kernels import triton

    return triton.OPS


def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from zero_kernels import triton

    return triton.why_unusable()


REGISTRY: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("cuda", frozenset({"cuda"}), lambda: compiled.OPS, lambda: compiled.why_unusable("cuda")),
        Backend("cpu", frozenset({"cpu"}), lambda: compiled.OPS, lambda: compiled.why_unusable("cpu")),
        Backend("triton", _TRITON_DEVICES, _triton_ops, _why_no_triton),
        Backend("reference", None, lambda: reference.OPS, lambda: None),
    )
}

# One value for the process, not one a thread: gradient hooks run in autograd's threads and must see it too.
_forced: str | None = None
_warned = False

choices = 0
"""How often `use_backend` has changed what is forced."""


def unusable_backends(device: torch.device | str = "cpu") -> dict[str, str]:
    """The backends that can't run on tensors of `device`, each with the reason in words."""
    reasons = {name: _why_unusable(backend, torch.device(device).type) for name, backend in REGISTRY.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def why_unusable(name: str, device: torch.device) -> str | None:
    """None when the backend can run on tensors of `device`, else the reason in words."""
    return _why_unusable(REGISTRY[name], device.type)


def available_backends(device: torch.device | str = "cpu") -> list[str]:
    """Names of the backends usable on tensors of `device`, in order of preference."""
    unusable = unusable_backends(device)
    return [name for name in REGISTRY if name not in unusable]


class use_backend:
    """Force a backend by name from now on, or for a `with` block; None goes back to the choice by preference.

    The environment variable ZERO_KERNELS_BACKEND does the same for a process; `use_backend` wins over it.
    Raises BackendError at once when the name is unknown or the backend can run on no device.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None:
            device_types = _lookup(name, "cpu").device_types
            _usable(name, "cpu" if device_types is None or "cpu" in device_types else "cuda")
        self._previous = _forced
        _force(name)

    def __enter__(self) -> "use_backend":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _force(self._previous)


def _force(name: str | None) -> None:
    global _forced, choices
    _forced = name
    choices += 1


def select(op: str, device: torch.device) -> Callable[..., Any]:
    """The function that runs `op` on tensors of `device`. Raises BackendError if the forced backend can't."""
    forced = _forced or os.environ.get(ENVIRONMENT)
    if forced:
        return _usable(forced, device.type).ops()[op]
    for backend in REGISTRY.values():
        if _why_unusable(backend, device.type) is None:
            if device.type == "cpu" and backend.name == "reference":
                _warn_once()
            return backend.ops()[op]
    raise BackendError(_explain(f"no backend runs {op} on {device.type} tensors", device.type))


def compiled_overload(op: str, device: torch.device) -> Callable[..., Any] | None:
    """Give the compiled library's own op where `select` picks that backend; None where it picks another."""
    return compiled.overload(op) if select(op, device) is compiled.OPS[op] else None


def check_backend(device: torch.device) -> None:
    """Raise BackendError unless every op can run on tensors of `device`."""
    for op in reference.OPS:
        select(op, device)


def _why_unusable(backend: Backend, device_type: str) -> str | None:
    if backend.device_types is not None and device_type not in backend.device_types:
        return f"runs on {', '.join(sorted(backend.device_types))} tensors, not on {device_type}"
    return backend.why_unusable()


def _lookup(name: str, device_type: str) -> Backend:
    if name not in REGISTRY:
        raise BackendError(_explain(f"backend {name!r} is unknown", device_type))
    return REGISTRY[name]


def _usable(name: str, device_type: str) -> Backend:
    backend = _lookup(name, device_type)
    reason = _why_unusable(backend, device_type)
    if reason is not None:
        raise BackendError(_explain(f"backend {name!r} is unusable on {device_type} tensors ({reason})", device_type))
    return backend


def _explain(problem: str, device_type: str) -> str:
    usable = ", ".join(available_backends(device_type)) or "none"
    unusable = "; ".join(f"{name}: {reason}" for name, reason in unusable_backends(device_type).items()) or "none"
    return f"{problem}. Usable on {device_type}: {usable}. Unusable: {unusable}."


def _warn_once() -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        "zero_kernels: the compiled CPU library is not usable, so the slower reference backend runs; "
        "`zero-optim doctor` says why",
        RuntimeWarning,
        stacklevel=3,
    )
