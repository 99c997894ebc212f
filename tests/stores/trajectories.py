"""One training for every store: overflows, clipping, absent gradients, accumulation, edits, a state dict in between."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from compare import bits, first_difference
from sharded_cases import Given, GivenNet, full_state
from torch import Tensor
from training_cases import make_gradients, maybe_no_sync

RUNS = (((17, 9), (300,), (1,)), ((5, 3, 2), (128,), (0,)), ((40, 25), (2, 1)), ((31,), (257,)))
SHAPES = [shape for run in RUNS for shape in run]
STEPS = 7
OVERFLOW, ABSENT, EDITED, SAVED, ZEROED = 2, 3, 4, 5, 6  # the step in which it happens


@dataclass(frozen=True)
class Store:
    """Arguments of the optimizer, and of ``shard_module`` at stage 3."""

    options: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in {**self.options, **self.shard}.items()) or "device"


@dataclass(frozen=True)
class Training:
    """``micro`` backwards a step, all of them reduced or, with ``no_sync``, the last alone."""

    stage: int
    dtype: torch.dtype
    micro: int = 1
    no_sync: bool = False
    scaled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """``parameters`` after each step; ``state`` at the end; ``saved`` in the step SAVED, this rank's."""

    parameters: list[list[Tensor]]
    norms: list[float]
    state: dict[str, dict[str, Tensor]]
    saved: dict[str, dict[str, Tensor]]
    stats: dict[str, Any]


def train(rank: int, world_size: int, training: Training, stores: Sequence[Store]) -> list[Trajectory]:
    return [trajectory(rank, world_size, training, store) for store in stores]


def trajectory(rank: int, world_size: int, training: Training, store: Store) -> Trajectory:
    import zero_optim

    model = GivenNet(RUNS, training.dtype)
    if training.stage == 3:
        zero_optim.shard_module(model, (Given,), **store.shard)
    named = list(model.named_parameters())
    groups = [{"params": named[::2]}, {"params": named[1::2], "lr": 0.03}]
    opt = zero_optim.ShardedAdamW(
        groups, lr=0.02, weight_decay=0.1, stage=training.stage, **training.options, **store.options
    )
    scaler = zero_optim.GradScaler("cpu", init_scale=2.0**6, growth_interval=3) if training.scaled else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    after: list[list[Tensor]] = []
    norms: list[float] = []
    saved: dict[str, Any] = {}
    for step in range(STEPS):
        for micro in range(training.micro):
            with maybe_no_sync(opt, training.no_sync and micro < training.micro - 1):
                grads: list[Tensor | None] = list(make_gradients(_like(training.dtype), rank, step, micro))
                if step == OVERFLOW and rank == world_size - 1 and micro == 0:
                    grads[6] = torch.full_like(grads[6], float("inf"))
                if step == ABSENT:
                    grads[0] = grads[7] = None
                    grads[4] = None if rank else grads[4]
                loss = model(grads)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if step == ZEROED:
            model.zero_grad(set_to_none=False)  # of what was reduced: moments decay, and nothing else
        if step % 2:
            if scaler is not None:
                scaler.unscale_(opt)
            norms.append(float(opt.clip_grad_norm_(3.0)))
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        if step == EDITED:
            with zero_optim.gather_parameters(model, writeback=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        if step == SAVED:
            saved = _copied(opt.state_dict()["state"])
        opt.zero_grad()
        scheduler.step()
        with zero_optim.gather_parameters(model):
            after.append([parameter.detach().clone() for parameter in model.parameters()])
    outcome = Trajectory(after, norms, full_state(opt), saved, opt.stats())
    opt.close()
    return outcome


def _like(dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape in SHAPES]


def _copied(state: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {kind: copy.deepcopy(getattr(value, "local", value)) for kind, value in entry.items()}
        for name, entry in state.items()
    }


def difference(want: Trajectory, have: Trajectory) -> str | None:
    """Where they first differ in bits; None: nowhere."""
    return first_difference(*({**vars(one), "stats": None} for one in (want, have)), bits)
