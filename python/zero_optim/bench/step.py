"""``step`` and ``train_step``: a GPT on one device, ``ShardedAdamW`` against the AMP recipe.

``step`` is unscaling, clipping and updating; ``train_step`` is forward, backward, ``step`` and ``zero_grad``, so that
work moved from one into the other shows. Each contender trains a model of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zero_kernels import use_backend

from ..drop_ins import ShardedAdamW
from ..errors import ZeroOptimError
from ..grad_scaler import GradScaler
from ..train.model import GPT, VOCAB, ModelConfig, next_byte_loss
from .cases import COPY, HYPER, TORCH, Case, Row, Setting, copy_job
from .timing import Clock, Spread, interleaved

BYTES = 30  # adam_step's 28, and 2 to read the gradient for the norm, which must be known before the update
TRAINING = {**HYPER, "lr": 1e-5}  # low, as all steps of a run train on the same few windows
MAX_NORM = 1.0
SCALE = 2.0**7  # small enough that no fp16 gradient overflows: a skipped step would be a fast one
LAPS = ("backward", "step", "zero_grad")

Laps = dict[str, Callable[[], object]]


def model_config(numel: int, device: torch.device) -> ModelConfig:
    """Choose a model of about ``numel`` parameters: blocks of 12 hidden² each, a hundred times wider than their number.

    Windows are of a realistic length on a GPU, and as short as can be on a CPU.
    """
    hidden = max(64, 64 * round((100 * numel / 12) ** (1 / 3) / 64))
    layers = max(1, round(numel / (12 * hidden**2)))
    return ModelConfig(layers, hidden, hidden // 64, 1024 if device.type == "cuda" else 16)


def measure(setting: Setting, clock: Clock, rounds: int | None) -> list[Row]:
    """Make rows of ``step`` and of ``train_step``. The model has about ``setting.numel`` parameters.

    Raises ZeroOptimError where a step overflowed: one that is skipped has no figures.
    """
    with setting.device:
        model = GPT(model_config(setting.numel, setting.device), setting.torch_dtype)
    setting = replace(setting, numel=sum(parameter.numel() for parameter in model.parameters()))
    batch = 4 if setting.device.type == "cuda" else 1
    windows = torch.randint(VOCAB, (batch, model.config.seq + 1), device=setting.device)
    with use_backend(backend := setting.backends[0]):  # the fastest alone, as its model takes much memory
        contenders = {backend: ours(copy.deepcopy(model), windows), TORCH: amp_recipe(model, windows)}
        jobs = {name: [laps[lap] for lap in LAPS] for name, laps in contenders.items()}
        times = interleaved({**jobs, COPY: copy_job(setting, BYTES)}, clock, rounds)
    for name, laps in contenders.items():
        if laps["skipped"]():
            raise ZeroOptimError(f"step: a step of {name} overflowed and was skipped: no figures")
    return make_rows(Case("step", setting, BYTES, jobs), times)


def make_rows(case: Case, times: Mapping[str, Sequence[Sequence[float]]]) -> list[Row]:
    """Make the rows. ``times``: milliseconds of each lap in each round."""
    laps = {name: dict(zip(LAPS, zip(*times[name], strict=True), strict=True)) for name in case.jobs}
    rows = case.rows({**{name: laps[name]["step"] for name in laps}, COPY: [copy for (copy,) in times[COPY]]})
    whole = {name: Spread.of([*map(sum, times[name])]) for name in laps}
    return rows + [
        {
            "op": "train_step",
            "backend": name,
            "dtype": case.setting.dtype,
            "numel": case.setting.numel,
            **vars(spread),
            "vs_torch": round(whole[TORCH].ms / spread.ms, 4),
            "phases": {lap: Spread.of(of_lap).ms for lap, of_lap in laps[name].items()},
        }
        for name, spread in whole.items()
    ]


def ours(model: nn.Module, windows: Tensor) -> Laps:
    """Train by ``ShardedAdamW`` on one rank."""
    opt = ShardedAdamW(model.named_parameters(), **TRAINING)
    scaler = GradScaler(**_scaling(model, windows))

    def step() -> object:
        scaler.unscale_(opt)
        norm = opt.clip_grad_norm_(MAX_NORM)
        scaler.step(opt)
        scaler.update()
        return norm

    return {
        "backward": lambda: scaler.scale(next_byte_loss(model, windows)).backward(),
        "step": step,
        "zero_grad": opt.zero_grad,
        "skipped": lambda: opt.stats()["skipped_steps"],
    }


def amp_recipe(model: nn.Module, windows: Tensor) -> Laps:
    """Train with loss scaling for fp16, clipping, and ``AdamW(fused=True)`` on fp32 masters, cast into the model."""
    masters = Masters(model.parameters())
    opt = torch.optim.AdamW(masters.masters, fused=True, **TRAINING)
    scaler = torch.amp.GradScaler(**_scaling(model, windows))

    def step() -> object:
        masters.take_gradients()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(masters.masters, MAX_NORM)
        scaler.step(opt)
        masters.give_back()
        scaler.update()
        return norm

    return {
        "backward": lambda: scaler.scale(next_byte_loss(model, windows)).backward(),
        "step": step,
        "zero_grad": model.zero_grad,
        "skipped": lambda: scaler.is_enabled() and scaler.get_scale() != SCALE,
    }


def _scaling(model: nn.Module, windows: Tensor) -> dict[str, Any]:
    fp16 = next(model.parameters()).dtype == torch.float16
    return {"device": windows.device.type, "init_scale": SCALE, "growth_interval": 2**30, "enabled": fp16}


class Masters:
    """fp32 copies, for an optimizer to step, of a model's parameters and gradients. fp32 parameters are their own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params: list[Tensor] = list(params)
        self.separate = any(parameter.dtype != torch.float32 for parameter in self.params)
        self.masters: list[Tensor] = self.params
        if self.separate:
            self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.params]
            for master in self.masters:
                master.grad = torch.empty_like(master)

    def take_gradients(self) -> None:
        if self.separate:
            grads = [master.grad for master in self.masters if master.grad is not None]
            torch._foreach_copy_(grads, [p.grad for p in self.params if p.grad is not None])

    @torch.no_grad()
    def give_back(self) -> None:
        if self.separate:
            torch._foreach_copy_(self.params, self.masters)
