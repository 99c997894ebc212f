"""AdamW (Loshchilov and Hutter, 2019), Adam with L2 in the gradient (Kingma and Ba, 2015), and AMSGrad of either
(Reddi, Kale and Kumar, 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .kernel_rule import KernelRule
from .options import DIFFERENTIABLE, Betas, Fixed, Flag, Number, of_another_optimizer

_LARGEST = "max_exp_avg_sq"


class AdamW(KernelRule):
    """``decoupled``: False is Adam. ``amsgrad``: divide by the root of the largest second moment so far."""

    options = (
        Number("lr", 1e-3, rate=True),
        Betas("betas", (0.9, 0.999)),
        Number("eps", 1e-8),
        Number("weight_decay", 1e-2),
        Flag("maximize"),
        Fixed("amsgrad"),
        DIFFERENTIABLE,
    )
    counterparts = frozenset(("Adam", "AdamW"))
    nonnegative = frozenset(("exp_avg_sq", _LARGEST))
    torch_options = MappingProxyType(torch.optim.AdamW([torch.empty(0, device="cpu")]).defaults)

    def __init__(self, decoupled: bool = True, **values: Any) -> None:
        super().__init__("adamw", **values)
        self.decoupled = decoupled
        self._use("amsgrad" if self.defaults["amsgrad"] else "adamw")

    @property
    def said(self) -> dict[str, Any]:
        return {"decoupled_weight_decay": self.decoupled}

    def refuse_saved(self, number: int, group: Mapping[str, Any]) -> str | None:
        if group.get("weight_decay") and group.get("decoupled_weight_decay", self.decoupled) != self.decoupled:
            return (
                f"group {number} of the state was trained with decoupled_weight_decay={not self.decoupled}: give that "
                "to this optimizer's constructor"
            )
        return None

    def refuse_options(self, number: int, group: Mapping[str, Any]) -> str | None:
        return of_another_optimizer(number, group, "betas", ("momentum", "dampening", "nesterov"))

    def read_group(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        lr, beta1, beta2, eps, weight_decay, *others = super().read_group(group)
        return (lr, beta1, beta2, eps, weight_decay, float(self.decoupled), *others)

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        torch.ops.zero_kernels.hyper_table(by_group, group_of, steps, active, table)
