"""The fused Adams of other packages, where they can be installed: each steps an fp32 parameter in place."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..doctor import version_of

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

Maker = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Package:
    """A package with a fused Adam. ``load`` imports its optimizer for a device type."""

    module: str
    distribution: str
    device_types: frozenset[str]
    load: Callable[[str], Maker]


def _deepspeed(device_type: str) -> Maker:
    adam = importlib.import_module("deepspeed.ops.adam")
    if device_type == "cpu":
        return functools.partial(adam.DeepSpeedCPUAdam, adamw_mode=True, **HYPER)
    return functools.partial(adam.FusedAdam, adam_w_mode=True, **HYPER)


def _of_gpus(module: str) -> Callable[[str], Maker]:
    return lambda device_type: functools.partial(importlib.import_module(module).FusedAdam, adam_w_mode=True, **HYPER)


PACKAGES = {
    "deepspeed": Package("deepspeed", "deepspeed", frozenset({"cpu", "cuda"}), _deepspeed),
    "apex": Package("apex", "apex", frozenset({"cuda"}), _of_gpus("apex.optimizers")),
    "te": Package(
        "transformer_engine",
        "transformer-engine",
        frozenset({"cuda"}),
        _of_gpus("transformer_engine.pytorch.optimizers"),
    ),
}


def fused_adams(device: torch.device) -> dict[str, Maker]:
    """Load the optimizers that work on the device, by package."""
    return {
        name: package.load(device.type) for name, package in PACKAGES.items() if why_unusable(name, device.type) is None
    }


def describe(device: torch.device) -> dict[str, str]:
    """Tell the version of each package, or why it was not measured."""
    reasons = {name: why_unusable(name, device.type) for name in PACKAGES}
    return {
        name: reason or version_of(PACKAGES[name].distribution) or "version unknown" for name, reason in reasons.items()
    }


@functools.cache
def why_unusable(name: str, device_type: str) -> str | None:
    """Try a step on a small parameter, once: the first use may compile for a minute. None: it went through."""
    package = PACKAGES[name]
    if device_type not in package.device_types:
        return f"not for {device_type}"
    if importlib.util.find_spec(package.module) is None:
        return "not installed"
    try:
        parameter = torch.nn.Parameter(torch.ones(256, device=device_type))
        parameter.grad = torch.ones_like(parameter)
        package.load(device_type)([parameter]).step()
    except Exception as error:  # a failed build or a missing library, by whatever type the package reports it
        return f"does not work: {' '.join(str(error).split())[:200]}"
    return None
