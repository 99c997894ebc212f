"""The configuration of a training run: from the flags, or from the checkpoint that it resumes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..stores.offload import read_offload
from .model import ModelConfig

# Smaller defaults: on a CPU fp16 matrix products are ~60 times slower than bf16 ones (seen on 2 cores with AMX).
_FP16_ON_CPU = {"layers": 2, "hidden": 128, "heads": 2, "seq": 128, "batch": 4, "steps": 400, "lr": 2e-3}
# bf16 is emulated there, at a third of the speed of fp32 or less. Fewer windows: two minutes on two slow cores.
_FP32_ON_CPU = {"dtype": "fp32", "batch": 2, "steps": 250}

Flags = Mapping[str, Any]  # the fields of ``TrainConfig`` that the command line gives
RESUME_AUTO = Path("auto")
# A resumed run takes these from its checkpoint.
_FIXED_ON_RESUME = [field.name for field in fields(ModelConfig)]
_FIXED_ON_RESUME += ["optimizer", "lr", "muon_lr", "warmup", "weight_decay", "clip", "seed"]


@dataclass(frozen=True)
class TrainConfig(ModelConfig):
    """One training run, a field for each flag. The defaults: two minutes on two CPU cores with bf16 units."""

    stage: int = 2
    dtype: str = "bf16"
    batch: int = 4
    accumulate: int = 1
    steps: int = 500
    optimizer: str = "adamw"
    lr: float = 4e-3
    muon_lr: float = 0.02
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    device: str = "cpu"
    data: str | None = None
    out: str | None = None
    save_every: int = 0
    keep_last: int = 0
    checkpoint: bool = True
    state_offload: str | None = None
    device_budget: str | None = None
    param_offload: str | None = None
    master: str | None = None
    state_dtype: str = "fp32"
    telemetry_every: int | None = None


def given_flags(arguments: argparse.Namespace) -> Flags:
    """Collect the flags that were given. Raises UsageError."""
    values = {field.name: getattr(arguments, field.name) for field in fields(TrainConfig)}
    given = {name: value for name, value in values.items() if value is not None}
    if arguments.resume == RESUME_AUTO and "out" not in given:
        raise UsageError("--resume auto: looks for checkpoints in --out, which is not given")
    return given


def fresh_config(given: Flags, device: str) -> TrainConfig:
    """Make the configuration of a fresh run on ``device`` ("cpu" or "cuda"). Raises UsageError."""
    defaults: dict[str, Any] = {}
    needs_bf16 = given.get("master") in ("split", "split8")
    dtype = given.get("dtype", "bf16" if needs_bf16 else None)
    if dtype is None and not has_bf16_units(device):
        defaults = _FP32_ON_CPU if device == "cpu" else {"dtype": "fp32"}
    elif dtype == "fp16" and device == "cpu":
        defaults = _FP16_ON_CPU
    return _checked(TrainConfig(**{**defaults, **given, "device": device}))


def has_bf16_units(device: str) -> bool:
    """Return whether the hardware has instructions for bf16 products, as AVX512-BF16, AMX and Ampere have."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10 has none
    return any(there is True and "bf16" in name for name, there in capabilities.items())


def resumed_config(saved: Mapping[str, Any], given: Flags, device: str) -> TrainConfig:
    """Make the saved run's configuration, with the flags that a resumed run may change. Any other raises UsageError."""
    for name in _FIXED_ON_RESUME:
        if given.get(name, saved[name]) != saved[name]:
            flag = "--" + name.replace("_", "-")
            made = f"the checkpoint was made with {flag} {saved[name]}"
            raise UsageError(f"{flag} {given[name]}: {made}; leave the flag out to resume")
    return _checked(TrainConfig(**{**saved, **given, "device": device}))


def _checked(config: TrainConfig) -> TrainConfig:
    """Return the configuration. Raises UsageError for flags that do not go together."""
    try:
        read_offload(config.state_offload, config.device_budget)
    except ValueError as error:
        raise UsageError(f"--state-offload, --device-budget: {error}") from error
    if config.param_offload is not None and config.stage < 3:
        raise UsageError(f"--param-offload {config.param_offload}: needs --stage 3, which shards parameters")
    if config.hidden % (2 * config.heads):
        sizes = f"--hidden {config.hidden}, --heads {config.heads}"
        raise UsageError(f"{sizes}: --hidden must be a multiple of twice --heads, as rotary positions turn pairs")
    return config
