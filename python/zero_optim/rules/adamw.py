"""AdamW (Loshchilov and Hutter, 2019) and Adam with L2 in the gradient (Kingma and Ba, 2015), on ``adam_step``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import zero_kernels

from .update_rule import Begins, ShardUpdate, StateTensor


@dataclass(frozen=True)
class AdamW:
    """``decoupled``: False is Adam. ``adam_step``: the op as this one's updates call it. See ``UpdateRule`` for the
    rest."""

    decoupled: bool = True
    adam_step: Callable[..., None] = field(default=zero_kernels.adam_step, repr=False, compare=False)

    tensors = (StateTensor("master", Begins.PARAMETER), StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
    coefficients = zero_kernels.HYPER_COEFFICIENTS
    columns = zero_kernels.HYPER_COLUMNS

    def read_group(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        maximize = group.get("maximize", False)
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], float(self.decoupled), maximize)

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        torch.ops.zero_kernels.hyper_table(by_group, group_of, steps, active, table)

    def for_shard(self) -> AdamW:
        return AdamW(self.decoupled, zero_kernels.Prepared("adam_step"))

    def update(self, shard: ShardUpdate) -> None:
        master = shard.state.get("master")
        self.adam_step(
            shard.grad,
            shard.parameter if master is None else master,
            shard.state["exp_avg"],
            shard.state["exp_avg_sq"],
            None if master is None else shard.parameter,
            shard.row_slot,
            shard.hyper,
            shard.grad_scale,
            shard.found_inf,
            shard.marks,
        )

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


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
