"""Lion: the sign of an interpolated momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .kernel_rule import KernelRule
from .options import Betas, Flag, Number, of_another_optimizer
from .update_rule import MASTER, in_fp32

_UNDECIDED = 2.0**-16
"""A sum this small beside its terms may have another sign in fp32. An fp32 momentum is off by some 2^-24 of the largest
gradient of late, which may be larger than the one at hand."""


class Lion(KernelRule):
    """One momentum: 4 bytes a parameter less than AdamW. Use a learning rate 3 to 10 times smaller than AdamW's, and a
    weight decay as many times larger."""

    options = (
        Number("lr", 1e-4, rate=True),
        Betas("betas", (0.9, 0.99)),
        Number("weight_decay", 0.0),
        Flag("maximize"),
    )
    needs_steps = False
    # As of AdamW. What it subtracts is lr itself, or nothing.
    ulps_an_update = 4

    def __init__(self, **values: Any) -> None:
        super().__init__("lion", **values)

    def refuse_options(self, number: int, group: Mapping[str, Any]) -> str | None:
        return of_another_optimizer(number, group, "betas", ("momentum", "dampening", "nesterov"))

    def update_in_float64(
        self, state: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any], step: float
    ) -> Tensor:
        lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
        p, m = state[MASTER], state["exp_avg"]
        g = -gradient if group.get("maximize") else gradient
        kept, new = m * in_fp32(beta1), g * in_fp32(1 - beta1)
        p.mul_(in_fp32(1 - lr * decay)).sub_(in_fp32(lr) * torch.sign(kept + new))
        undecided = (kept + new).abs() <= _UNDECIDED * (m.abs() + g.abs())
        m.mul_(in_fp32(beta2)).add_(g * in_fp32(1 - beta2))
        return undecided
