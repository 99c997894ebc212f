"""Training steps of a GPT on one device: ``ShardedAdamW`` against the AMP recipe, each with a model of its own.

    python benchmarks/bench_gpt_step.py --numel 16Mi --dtypes bf16

There are two ops: ``step`` is unscaling, clipping and updating; ``train_step`` is forward, backward, ``step`` and
``zero_grad``, so that work moved from one into the other shows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from launches import count_launches
from script import run_script
from torch import Tensor, nn
from zero_optim import ShardedAdamW
from zero_optim.bench.case import COPY, TORCH, Case, Setting, copy_job, on_backend
from zero_optim.bench.contenders import model_config
from zero_optim.bench.fused_adams import HYPER
from zero_optim.bench.masters import Masters
from zero_optim.bench.request import DTYPES, Choices, Menu
from zero_optim.bench.rows.op import Row
from zero_optim.bench.run import Op
from zero_optim.bench.timing import Clock, Job, Spread, TimedRounds, interleaved
from zero_optim.errors import ZeroOptimError
from zero_optim.grad_scaler import GradScaler
from zero_optim.train.model import GPT, VOCAB, ModelConfig, next_byte_loss

BYTES = 30  # adam_step's 28, and 2 to read the gradient for the norm, which must be known before the update
TRAINING = {**HYPER, "lr": 1e-5}  # low, as all steps of a run train on the same few windows
MAX_NORM = 1.0
SCALE = 2.0**7  # small enough that no fp16 gradient overflows: a skipped step would be a fast one
NEVER = 2**30

LAPS = ("backward", "unscale", "clip", "update", "zero_grad")
PHASES = ("unscale", "clip", "update")

Laps = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Contender:
    """One way to train. ``laps``: by name, one for each of LAPS. ``skipped``: counts the steps that overflowed."""

    laps: Laps
    skipped: Callable[[], int]
    buckets: int | None = None

    @property
    def job(self) -> Job:
        return [self.laps[name] for name in LAPS]


def measure(setting: Setting, clock: Clock, rounds: TimedRounds) -> list[Row]:
    """Make rows of ``step`` and of ``train_step``. The model has about ``setting.numel`` parameters."""
    model = make_model(model_config(setting.numel, setting.device), setting)
    setting = replace(setting, numel=sum(parameter.numel() for parameter in model.parameters()))
    contenders = make_contenders(model, setting)
    jobs = {name: contender.job for name, contender in contenders.items()}
    case = Case("step", setting, BYTES, COPY, {**jobs, COPY: copy_job(setting, BYTES)})
    times = interleaved(case.jobs, clock, rounds)
    launches = {name: _launches(setting.device, contender) for name, contender in contenders.items()}
    for name, contender in contenders.items():
        if contender.skipped():
            raise ZeroOptimError(f"step: {contender.skipped()} steps of {name} overflowed and were skipped: no figures")
    laps = {name: _by_lap(times[name]) for name in contenders}
    return _step_rows(case, laps, times[COPY], launches) + _train_step_rows(case, laps)


def make_model(config: ModelConfig, setting: Setting) -> GPT:
    with setting.device:
        return GPT(config, setting.torch_dtype)


def make_contenders(model: GPT, setting: Setting) -> dict[str, Contender]:
    batch = 4 if setting.device.type == "cuda" else 1
    windows = torch.randint(VOCAB, (batch, model.config.seq + 1), device=setting.device)
    contenders = {name: on(name, ours(copy.deepcopy(model), windows)) for name in setting.backends}
    return {**contenders, TORCH: amp_recipe(model, windows)}


def on(backend: str, contender: Contender) -> Contender:
    laps = {name: on_backend(backend, lap) for name, lap in contender.laps.items()}
    return replace(contender, laps=laps)


def ours(model: nn.Module, windows: Tensor) -> Contender:
    opt = ShardedAdamW(model.named_parameters(), **TRAINING)
    scaler = GradScaler(**_scaling(model, windows))

    def update() -> None:
        scaler.step(opt)
        scaler.update()

    laps: Laps = {
        "backward": lambda: scaler.scale(next_byte_loss(model, windows)).backward(),
        "unscale": lambda: scaler.unscale_(opt),
        "clip": lambda: opt.clip_grad_norm_(MAX_NORM),
        "update": update,
        "zero_grad": opt.zero_grad,
    }
    return Contender(laps, lambda: opt.stats()["skipped_steps"], opt.stats()["buckets"])


def amp_recipe(model: nn.Module, windows: Tensor) -> Contender:
    """Train with loss scaling for fp16, clipping, and ``AdamW(fused=True)`` on fp32 masters, cast into the model."""
    masters = Masters(model.parameters())
    opt = torch.optim.AdamW(masters.masters, fused=True, **TRAINING)
    scaler = torch.amp.GradScaler(**_scaling(model, windows))

    def unscale() -> None:
        masters.take_gradients()
        scaler.unscale_(opt)

    def update() -> None:
        scaler.step(opt)
        masters.give_back()
        scaler.update()

    laps: Laps = {
        "backward": lambda: scaler.scale(next_byte_loss(model, windows)).backward(),
        "unscale": unscale,
        "clip": lambda: nn.utils.clip_grad_norm_(masters.masters, MAX_NORM),
        "update": update,
        "zero_grad": model.zero_grad,
    }
    return Contender(laps, lambda: int(scaler.is_enabled() and scaler.get_scale() != SCALE))


def _scaling(model: nn.Module, windows: Tensor) -> dict[str, Any]:
    fp16 = next(model.parameters()).dtype == torch.float16
    return {"device": windows.device.type, "init_scale": SCALE, "growth_interval": NEVER, "enabled": fp16}


def _launches(device: torch.device, contender: Contender) -> dict[str, int] | None:
    def step() -> None:
        for name in PHASES:
            contender.laps[name]()

    def backward() -> None:
        contender.laps["zero_grad"]()
        contender.laps["backward"]()

    counts = count_launches(device, backward, step)
    if counts is not None and contender.buckets is not None:
        counts["buckets"] = contender.buckets
    return counts


def _by_lap(rounds: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    return {name: list(times) for name, times in zip(LAPS, zip(*rounds, strict=True), strict=True)}


def _sums(laps: Mapping[str, Sequence[float]], names: Sequence[str]) -> list[float]:
    return [sum(times) for times in zip(*(laps[name] for name in names), strict=True)]


def _step_rows(
    case: Case,
    laps: Mapping[str, Mapping[str, Sequence[float]]],
    copy_times: Sequence[Sequence[float]],
    launches: Mapping[str, dict[str, int] | None],
) -> list[Row]:
    totals = {name: _sums(of_contender, PHASES) for name, of_contender in laps.items()}
    rows = case.rows({**totals, COPY: [sum(times) for times in copy_times]})
    medians = {name: {phase: Spread.of(laps[name][phase]).ms for phase in PHASES} for name in laps}
    return [replace(row, phases=medians.get(row.backend), launches=launches.get(row.backend)) for row in rows]


def _train_step_rows(case: Case, laps: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Row]:
    """Make rows of the whole training step."""
    spreads = {name: Spread.of(_sums(of_contender, LAPS)) for name, of_contender in laps.items()}
    return [
        Row.of_whole(
            op="train_step",
            backend=name,
            dtype=case.setting.dtype,
            numel=case.setting.numel,
            spread=spread,
            vs_torch=spreads[TORCH].ms / spread.ms,
            phases={lap: Spread.of(laps[name][lap]).ms for lap in LAPS},
        )
        for name, spread in spreads.items()
    ]


ABOUT = "Trains a GPT on one device, and compares a step with the AMP recipe's."
TAKEN = {"numel": "16Mi; GPUs: 1e9", "backends": "", "rounds": ""}
MENU = Menu({"step": Choices(TAKEN, DTYPES, every_dtype=True, sizes=True, gpu=True)})
OPS = {"step": Op(measure, {"cpu": (2**24,), "cuda": (10**9,)}, side_by_side=False)}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("gpt_step", ABOUT, MENU, ops=OPS, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
