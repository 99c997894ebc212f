"""The model with its optimizer, one step at a time: the same code for one rank and for N."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import GradScaler, ShardedAdamW, ShardedMuon, checkpoint, memory, shard_module
from ..rules.muon import Muon
from .config import TrainConfig
from .data import draw_windows, fixed_windows
from .model import GPT, Block, next_byte_loss
from .report import EXPOSED, PhaseClock, blocked_seconds, peak_bytes
from .run_dir import StepRecord
from .session import RankReport
from .setup import Setup
from .world import World

_VALIDATION_WINDOWS = 128
_LEAST_LR = 0.1  # of the peak, at the end of the cosine
_MUON_LR = 0.02
_PREFETCH = 1  # blocks gathered ahead, at stage 3


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step, equal on all ranks except for times. ``stop``: some rank was asked to stop."""

    record: StepRecord
    stop: bool


class Trainer:
    """The training state that a checkpoint brings back: model, optimizer, loss scaler, schedule, random states."""

    def __init__(self, setup: Setup, world: World) -> None:
        self.config, self.corpus, self.world = setup.config, setup.corpus, world
        torch.manual_seed(self.config.seed)
        self.model = GPT(self.config.model, self.config.torch_dtype).to(world.device)
        if self.config.stage >= 3:
            shard_module(self.model, units=(Block,), prefetch=_PREFETCH, param_offload=self.config.param_offload)
        self.optimizer = ShardedAdamW(
            _parameter_groups(self.model, self.config),
            lr=self.config.lr,
            betas=(0.9, 0.95),
            stage=self.config.stage,
            state_offload=self.config.state_offload,
            device_budget=self.config.device_budget,
            master=self.config.master,
            state_dtype=self.config.state_dtype,
            telemetry=self.config.telemetry,
        )
        self.scaler = GradScaler(enabled=self.config.dtype == "fp16")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self.clock = PhaseClock(world.device)
        self.tracker = memory.track()
        self._blocked = 0.0
        self.steps_done = self._load(setup.saved.source) if setup.saved else 0

    def step(self, step: int, *, asked_to_stop: bool) -> StepOutcome:
        """Run one optimizer step over ``accumulate`` micro-batches. The host waits for the device once, after it."""
        start = time.perf_counter()
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.world.device)
        for micro in range(self.config.accumulate):
            loss += self._micro_batch(step, micro)
        with self.clock.phase("step"):
            self.scaler.unscale_(self.optimizer)
            norm = self.optimizer.clip_grad_norm_(self.config.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.schedule.step()
        mean_loss, norm_value, stops = self._agree(loss, norm, asked_to_stop)
        phases = self.clock.collect()
        telemetry = self._telemetry()
        seconds = time.perf_counter() - start
        record = StepRecord(
            step=step,
            loss=_finite(mean_loss),
            lr=lr,
            grad_norm=_finite(norm_value),
            loss_scale=self.scaler.get_scale(),
            tokens_per_s=self.config.tokens_per_step(self.world.size) / seconds,
            ms=_in_ms({**phases, "whole": seconds, **self._blocked_since_last_step()}),
            telemetry=telemetry,
        )
        return StepOutcome(record, stops > 0)

    def validation_loss(self) -> float:
        """Mean loss in nats per byte over fixed windows of the validation text, shared out over the ranks."""
        windows = fixed_windows(self.corpus.validation, self.config.seq, _VALIDATION_WINDOWS)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        with torch.no_grad():
            for part, counted in _parts_of_rank(windows, self.world.rank, self.world.size, self.config.batch):
                total += next_byte_loss(self.model, part.to(self.world.device)).double() * counted
        self.world.comm.exchange(total)
        return total.item() / len(windows)

    def parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def planned(self) -> memory.Plan:
        """Plan the memory of the mean rank."""
        return memory.plan_of(self.optimizer, mean=True, accumulate=self.config.accumulate)

    def report(self, steps: int) -> RankReport:
        """This rank's figures after ``steps`` steps of this session, its memory as ``tracker`` has seen it."""
        stats = self.optimizer.stats()
        return RankReport(
            memory=dict(self.tracker.peak),
            collectives=stats["collectives"],
            seconds=dict(self.clock.seconds),
            steps=steps,
            peak_bytes=peak_bytes(self.world.device),
            skipped_steps=stats["skipped_steps"],
        )

    def save(self, folder: Path, step: int) -> None:
        """Collective. Write the checkpoint of ``step`` into ``folder``."""
        extra = {"config": self.config.to_dict(), "data_digest": self.corpus.digest}
        checkpoint.save(
            folder,
            self.model,
            self.optimizer,
            step=step,
            scaler=self.scaler,
            scheduler=self.schedule,
            extra=extra,
            keep_last=self.config.keep_last or None,
        )

    def _load(self, source: Path) -> int:
        """Collective. Go on from a checkpoint, or from the newest whole one of a folder. Returns its step."""
        with warnings.catch_warnings(record=True) as told:
            loaded = checkpoint.load(source, self.model, self.optimizer, scaler=self.scaler, scheduler=self.schedule)
        for line in (*map(str, (one.message for one in told)), *loaded.notes) if self.world.leads else ():
            print(line, flush=True)
        return loaded.step

    def _micro_batch(self, step: int, micro: int) -> Tensor:
        """Add the gradients of one micro-batch. Returns its part of the step's loss, on the device."""
        config = self.config
        last = micro == config.accumulate - 1
        with contextlib.nullcontext() if last else self.optimizer.no_sync():
            with self.clock.phase("data and forward"):
                first = (micro * self.world.size + self.world.rank) * config.batch
                numbers = range(first, first + config.batch)
                windows = draw_windows(self.corpus.train, config.seq, numbers, seed=config.seed, step=step)
                loss = next_byte_loss(self.model, windows.to(self.world.device)) / config.accumulate
            with self.clock.phase("backward"):
                self.scaler.scale(loss).backward()
        return loss.detach()

    def _agree(self, loss: Tensor, norm: Tensor, asked_to_stop: bool) -> tuple[float, float, float]:
        """Collective. Mean loss, norm, and number of ranks asked to stop: one exchange, one read by the host."""
        vector = torch.stack((loss, torch.full_like(loss, float(asked_to_stop))))
        self.world.comm.exchange(vector)
        total, stops, norm_value = torch.cat((vector, norm.reshape(1))).tolist()
        return total / self.world.size, norm_value, stops

    def _telemetry(self) -> dict[str, float] | None:
        """Collective. Finite telemetry of the last step, to four digits to keep the log small. None: not asked for."""
        if not self.config.telemetry:
            return None
        numbers = self.optimizer.telemetry(over_ranks=True).floats()
        return {name: float(f"{value:.4g}") for name, value in numbers.items() if math.isfinite(value)}

    def _blocked_since_last_step(self) -> dict[str, float]:
        """Seconds that the host was blocked on the optimizer's collectives. Empty on a GPU, where it hardly ever is."""
        if self.world.device.type == "cuda":
            return {}
        before, self._blocked = self._blocked, blocked_seconds(self.optimizer.engine.sharding.everyone.stats())
        return {EXPOSED: self._blocked - before}

    def _lr_factor(self, done: int) -> float:
        """Linear warm-up, then a cosine from 1 to ``_LEAST_LR`` at the last step."""
        warmup, steps = min(self.config.warmup, self.config.steps // 4), self.config.steps
        if done < warmup:
            return (done + 1) / (warmup + 1)
        share = (done - warmup) / max(1, steps - warmup)
        return _LEAST_LR + (1 - _LEAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def _parameter_groups(model: GPT, config: TrainConfig) -> list[dict[str, Any]]:
    """Group parameters: matrices decay, gains and biases don't. With Muon, matrices of blocks are one more group."""
    named, decay = list(model.named_parameters()), config.weight_decay
    groups: list[dict[str, Any]] = []
    if config.optimizer == "muon":
        matrices, named = ShardedMuon.split(model)
        lr = _MUON_LR if config.muon_lr is None else config.muon_lr
        groups = [{"params": matrices, "rule": Muon(lr=lr, weight_decay=decay)}]
    return [
        {"params": [(name, p) for name, p in named if p.ndim >= 2], "weight_decay": decay},
        {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0},
        *groups,
    ]


def _parts_of_rank(windows: Tensor, rank: int, ranks: int, batch: int) -> Iterator[tuple[Tensor, int]]:
    """Give a rank's batches, and how many windows of each batch count.

    Every rank has as many batches, since at stage 3 each forward gathers parameters from all ranks. A rank with no
    window left runs the first window again, which counts 0.
    """
    own = windows[rank::ranks]
    for start in range(0, len(windows[::ranks]), batch):
        part = own[start : start + batch]
        yield (part, len(part)) if len(part) else (windows[:1], 0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_ms(seconds: dict[str, float]) -> dict[str, float]:
    """Round to the microsecond, which keeps the lines of the log short."""
    return {phase: round(1000 * value, 3) for phase, value in seconds.items()}
