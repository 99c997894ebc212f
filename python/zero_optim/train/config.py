"""The configuration of a training run: from the flags, or from the checkpoint that it resumes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..stores.offload import read_offload
from .model import ModelConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Smaller defaults: on a CPU fp16 matrix products are ~60 times slower than bf16 ones (seen on 2 cores with AMX).
_FP16_ON_CPU = {"layers": 2, "hidden": 128, "heads": 2, "seq": 128, "batch": 4, "steps": 400, "lr": 2e-3}
# bf16 is emulated there, at a third of the speed of fp32 or less. Fewer windows: two minutes on two slow cores.
_WITHOUT_BF16 = {"dtype": "fp32"}
_FP32_ON_CPU = {**_WITHOUT_BF16, "batch": 2, "steps": 250}

RESUME_AUTO = Path("auto")
# A resumed run takes every other flag from its checkpoint.
_FREE_ON_RESUME = {
    *("steps", "data", "out", "save_every", "keep_last", "checkpoint", "device", "stage", "dtype", "batch"),
    *("accumulate", "state_offload", "device_budget", "param_offload", "master", "state_dtype", "telemetry"),
}


@dataclass(frozen=True)
class TrainConfig:
    """One training run, a field for each flag (``zero-optim train --help``).

    The defaults are for two CPU cores with bf16 units and about two minutes.
    """

    stage: int = 2
    dtype: str = "bf16"
    layers: int = 3
    hidden: int = 192
    heads: int = 3
    seq: int = 256
    batch: int = 4
    accumulate: int = 1
    steps: int = 500
    optimizer: str = "adamw"
    lr: float = 4e-3
    muon_lr: float | None = None
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
    master: str = "fp32"
    state_dtype: str = "fp32"
    telemetry: bool = False

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(self.layers, self.hidden, self.heads, self.seq)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class TrainRequest:
    """The command line. ``given``: the flags of ``TrainConfig`` that it has, by name. ``resume``: a run directory or
    checkpoint; ``RESUME_AUTO``: ``--out``, if that holds a checkpoint. ``ranks`` None: start no processes."""

    given: Mapping[str, Any]
    resume: Path | None
    ranks: int | None
    command: str = "zero-optim train"


def read_request(arguments: argparse.Namespace) -> TrainRequest:
    """Collect the flags that were given. Raises UsageError."""
    names = [field.name for field in fields(TrainConfig)]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.resume == RESUME_AUTO and arguments.out is None:
        raise UsageError("--resume auto: looks for checkpoints in --out, which is not given")
    if not given.get("checkpoint", True) and (given.get("save_every") or given.get("keep_last")):
        raise UsageError("--no-checkpoint: --save-every and --keep-last say how to save; give the one or the other")
    for name in ("data", "resume"):
        path = getattr(arguments, name)
        if path not in (None, RESUME_AUTO) and not Path(path).exists():
            raise UsageError(f"--{name} {path}: no such file or folder")
    return TrainRequest(given, arguments.resume, arguments.ranks)


def fresh_config(given: Mapping[str, Any], device: str) -> TrainConfig:
    """Make the configuration of a fresh run on ``device`` ("cpu" or "cuda"). Raises UsageError."""
    config = TrainConfig(**{**_defaults(given, device), **given, "device": device})
    _check_together(config)
    return config


def _defaults(given: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Give the defaults that differ from those of ``TrainConfig``."""
    dtype = given.get("dtype", "bf16" if given.get("master", "fp32") != "fp32" else None)  # split masters need bf16
    if dtype is None and not has_bf16_units(device):
        return _FP32_ON_CPU if device == "cpu" else _WITHOUT_BF16
    return _FP16_ON_CPU if device == "cpu" and dtype == "fp16" else {}


def has_bf16_units(device: str) -> bool:
    """Tell whether the hardware has instructions for bf16 products, as AVX512-BF16, AMX and Ampere have."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if hasattr(torch.cpu, "get_capabilities"):
        return any(there is True and "bf16" in name for name, there in torch.cpu.get_capabilities().items())
    older = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # of torch 2.10
    return any(getattr(torch.cpu, name, lambda: False)() for name in older)


def resumed_config(saved: Mapping[str, Any], given: Mapping[str, Any], device: str) -> TrainConfig:
    """Make the saved run's configuration, with the flags that a resumed run may change. Any other raises UsageError."""
    saved = {**asdict(TrainConfig()), **saved}  # an earlier version had fewer flags
    for name, value in given.items():
        if name not in _FREE_ON_RESUME and saved[name] != value:
            flag = "--" + name.replace("_", "-")
            made = f"the checkpoint was made with {flag} {saved[name]}"
            raise UsageError(f"{flag} {value}: {made}; leave the flag out to resume")
    config = TrainConfig(**{**saved, **given, "device": device})
    _check_together(config)
    return config


def _check_together(config: TrainConfig) -> None:
    try:
        read_offload(config.state_offload, config.device_budget)
    except ValueError as error:
        raise UsageError(f"--state-offload, --device-budget: {error}") from error
    if config.param_offload is not None and config.stage < 3:
        raise UsageError(f"--param-offload {config.param_offload}: needs --stage 3, which shards parameters")
    if config.muon_lr is not None and config.optimizer != "muon":
        raise UsageError(f"--muon-lr {config.muon_lr}: is of --optimizer muon alone")
    if config.optimizer == "muon" and config.stage >= 3 and (config.state_offload or config.param_offload):
        remedy = "leave out --state-offload and --param-offload, or take --stage 2"
        raise UsageError(f"--optimizer muon: at stage 3 state and parameters stay on the device; {remedy}")
    if config.hidden % config.heads:
        raise UsageError(f"--hidden {config.hidden} is no multiple of --heads {config.heads}; change one of them")
    size = config.hidden // config.heads
    if size % 2:
        heads = f"--hidden {config.hidden} over --heads {config.heads} gives heads of {size}"
        raise UsageError(f"{heads}; rotary positions need an even size")
