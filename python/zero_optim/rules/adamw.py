"""AdamW (Loshchilov and Hutter, 2019) and Adam with L2 in the gradient (Kingma and Ba, 2015), on ``adam_step``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import zero_kernels

from .update_rule import Begins, ShardUpdate, StateTensor


@dataclass(frozen=True)
class AdamW:
    """``decoupled``: False is Adam. ``adam_step`` and ``foreach_step``: the ops as this one's updates call them.
    See ``UpdateRule`` for the rest."""

    decoupled: bool = True
    adam_step: Callable[..., None] = field(default=zero_kernels.adam_step, repr=False, compare=False)
    foreach_step: Callable[..., None] = field(default=zero_kernels.foreach_step, repr=False, compare=False)

    tensors = (StateTensor("master", Begins.PARAMETER), StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
    coefficients = zero_kernels.HYPER_COEFFICIENTS
    columns = zero_kernels.HYPER_COLUMNS

    def read_group(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        maximize = group.get("maximize", False)
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], float(self.decoupled), maximize)

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        torch.ops.zero_kernels.hyper_table(by_group, group_of, steps, active, table)

    def prepared(self) -> AdamW:
        return AdamW(self.decoupled, *map(zero_kernels.Prepared, ("adam_step", "foreach_step")))

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        shared = shards[0][-4:]  # hyper, grad_scale, found_inf, marks
        if len(shards) == 1:
            self.adam_step(*_tensors(shards[0]), *shared)
            return
        grads, masters, exp_avgs, exp_avg_sqs, outs, row_slots = map(list, zip(*map(_tensors, shards), strict=True))
        states = [state for pair in zip(exp_avgs, exp_avg_sqs, strict=True) for state in pair]
        self.foreach_step("adamw", grads, masters, states, [] if outs[0] is None else outs, row_slots, *shared)

    def update_in_float64(
        self, state: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any], step: float
    ) -> None:
        lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
        p, m, v = state["master"], state["exp_avg"], state["exp_avg_sq"]
        g = -gradient if group.get("maximize") else gradient
        if self.decoupled:
            p.mul_(_f32(1 - lr * decay))
        else:
            g = g + _f32(decay) * p
        m.mul_(_f32(beta1)).add_(g * _f32(1 - beta1))
        v.mul_(_f32(beta2)).add_(g * g * _f32(1 - beta2))
        root = v.sqrt() / _f32(math.sqrt(1 - beta2**step)) + _f32(float(group["eps"]))
        p.sub_(_f32(lr / (1 - beta1**step)) * (m / root))


def _tensors(shard: ShardUpdate) -> tuple[Tensor | None, ...]:
    """List what ``adam_step`` takes, in its order: gradient, master, moments, what the master is cast into if there is
    one, rows."""
    state = shard.state
    master = state.get("master")
    out = None if master is None else shard.parameter
    own = shard.parameter if master is None else master
    return (shard.grad, own, state["exp_avg"], state["exp_avg_sq"], out, shard.row_slot)


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
