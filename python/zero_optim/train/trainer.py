"""The model with its optimizer, one step at a time: the same code for one rank and for N."""

from __future__ import annotations

import contextlib
import itertools
import math
import resource
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import GradScaler, ShardedAdamW, ShardedMuon, checkpoint, memory, shard_module
from ..rules.muon import Muon
from .config import TrainConfig
from .data import Corpus, draw_windows, fixed_windows
from .model import GPT, Block, next_byte_loss
from .page import EXPOSED, WHOLE, blocked_seconds
from .world import World

_VALIDATION_WINDOWS = 128
_LEAST_LR = 0.1  # of the peak, at the end of the cosine
_MUON_LR = 0.02
_PREFETCH = 1  # blocks gathered ahead, at stage 3


class PhaseClock:
    """Seconds spent in each phase: on the host for a CPU, between events of the current stream for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End a phase, which began at the mark before."""
        now: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            now.record()
        self._marks.append((phase, now))

    def collect(self) -> dict[str, float]:
        """Give the seconds of each phase since the first mark. On a GPU, call it after a wait for the device."""
        of_step: dict[str, float] = {}
        for (_, start), (phase, end) in itertools.pairwise(self._marks):
            seconds = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            for total in (of_step, self.seconds):
                total[phase] = total.get(phase, 0.0) + seconds
        self._marks.clear()
        return of_step


class Trainer:
    """The training state that a checkpoint brings back: model, optimizer, loss scaler, schedule, random states."""

    def __init__(self, config: TrainConfig, corpus: Corpus, world: World) -> None:
        self.config, self.corpus, self.world = config, corpus, world
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, config.torch_dtype).to(world.device)
        if config.stage >= 3:
            shard_module(self.model, units=(Block,), prefetch=_PREFETCH, param_offload=config.param_offload)
        self.optimizer = ShardedAdamW(
            _parameter_groups(self.model, config),
            lr=config.lr,
            betas=(0.9, 0.95),
            stage=config.stage,
            state_offload=config.state_offload,
            device_budget=config.device_budget,
            master=config.master,
            state_dtype=config.state_dtype,
            telemetry=config.telemetry,
        )
        self.scaler = GradScaler(enabled=config.dtype == "fp16")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self.clock = PhaseClock(world.device)
        self.tracker = memory.track()
        self.steps_done = 0
        self._blocked = 0.0

    def step(self, step: int, *, asked_to_stop: bool) -> tuple[dict[str, Any], bool]:
        """Run one optimizer step over ``accumulate`` micro-batches. The host waits for the device once, after it.

        Returns its line of ``log.jsonl``, and whether some rank was asked to stop. Losses and norms are None where they
        are not finite; ``ms`` is of this rank; all else is equal on all ranks.
        """
        start = time.perf_counter()
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.world.device)
        self.clock.mark("start")
        for micro in range(self.config.accumulate):
            loss += self._micro_batch(step, micro)
        self.scaler.unscale_(self.optimizer)
        norm = self.optimizer.clip_grad_norm_(self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clock.mark("step")
        self.schedule.step()
        mean_loss, norm_value, stops = self._exchange(loss, norm, asked_to_stop)
        phases = self.clock.collect()
        telemetry = self._telemetry()
        seconds = time.perf_counter() - start
        times = {**phases, WHOLE: seconds, **self._blocked_since_last_step()}
        tokens = self.world.size * self.config.batch * self.config.seq * self.config.accumulate
        record = {
            "step": step,
            "loss": finite(mean_loss),
            "lr": lr,
            "grad_norm": finite(norm_value),  # of the averaged gradients, before clipping
            "loss_scale": self.scaler.get_scale(),
            "tokens_per_s": tokens / seconds,
            "ms": {phase: round(1000 * value, 3) for phase, value in times.items()},
            **telemetry,
        }
        return record, stops > 0

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Collective. Mean loss in nats per byte over fixed windows of the validation text, split over the ranks."""
        windows, ranks = fixed_windows(self.corpus.validation, self.config.seq, _VALIDATION_WINDOWS), self.world.size
        if even := len(windows) - len(windows) % ranks:  # as many for each: at stage 3 every forward gathers
            windows = windows[self.world.comm.rank : even : ranks]
        parts = windows.to(self.world.device).split(self.config.batch)
        loss = torch.stack([next_byte_loss(self.model, part).double() * len(part) for part in parts]).sum()
        self.world.comm.exchange(loss)
        return loss.item() / len(windows) / ranks

    def report(self, steps: int) -> dict[str, Any]:
        """This rank's figures after ``steps`` steps: the most bytes of each kind of memory (not all at one time),
        calls, bytes and seconds blocked by collective, seconds by phase, and the peak of allocated or resident bytes.
        """
        stats = self.optimizer.stats()
        return {
            "memory": dict(self.tracker.peak),
            "collectives": stats["collectives"],
            "seconds": dict(self.clock.seconds),
            "steps": steps,
            "peak_bytes": _peak_bytes(self.world.device),
            "skipped_steps": stats["skipped_steps"],
        }

    def save(self, folder: Path, step: int) -> None:
        """Collective. Write the checkpoint of ``step`` into ``folder``."""
        checkpoint.save(
            folder,
            self.model,
            self.optimizer,
            step=step,
            scaler=self.scaler,
            scheduler=self.schedule,
            extra={"config": asdict(self.config), "data_digest": self.corpus.digest},
            keep_last=self.config.keep_last or None,
        )

    def load(self, source: Path) -> None:
        """Collective. Resume from a checkpoint, or from the newest whole one of a folder."""
        with warnings.catch_warnings(record=True) as caught:
            loaded = checkpoint.load(source, self.model, self.optimizer, scaler=self.scaler, scheduler=self.schedule)
        for line in (*(str(warning.message) for warning in caught), *loaded.notes) if self.world.leads else ():
            print(line, flush=True)
        self.steps_done = loaded.step

    def _micro_batch(self, step: int, micro: int) -> Tensor:
        """Add the gradients of one micro-batch. Returns its part of the step's loss, on the device."""
        config = self.config
        first = (micro * self.world.size + self.world.comm.rank) * config.batch
        with contextlib.nullcontext() if micro == config.accumulate - 1 else self.optimizer.no_sync():
            numbers = range(first, first + config.batch)
            windows = draw_windows(self.corpus.train, config.seq, numbers, seed=config.seed, step=step)
            loss = next_byte_loss(self.model, windows.to(self.world.device)) / config.accumulate
            self.clock.mark("data and forward")
            self.scaler.scale(loss).backward()
            self.clock.mark("backward")
        return loss.detach()

    def _exchange(self, loss: Tensor, norm: Tensor, asked_to_stop: bool) -> tuple[float, float, float]:
        """Collective. Mean loss, norm, and number of ranks asked to stop: one exchange, one read by the host."""
        vector = torch.stack((loss, torch.full_like(loss, float(asked_to_stop))))
        self.world.comm.exchange(vector)
        total, stops, norm_value = torch.cat((vector, norm.reshape(1))).tolist()
        return total / self.world.size, norm_value, stops

    def _telemetry(self) -> dict[str, dict[str, float]]:
        """Collective. Finite telemetry of the last step, to four digits to keep the log small. Empty: not asked for."""
        if not self.config.telemetry:
            return {}
        numbers = self.optimizer.telemetry(over_ranks=True).floats()
        finite = {name: float(f"{value:.4g}") for name, value in numbers.items() if math.isfinite(value)}
        return {"telemetry": finite}

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
        part = (done - warmup) / max(1, steps - warmup)
        return _LEAST_LR + (1 - _LEAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, part)))


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


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def finite(value: float) -> float | None:
    """Give the value, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None
