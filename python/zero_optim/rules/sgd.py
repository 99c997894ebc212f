"""SGD with momentum, of Nesterov's kind or not, as ``torch.optim.SGD`` has it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .kernel_rule import KernelRule
from .options import DIFFERENTIABLE, Flag, Number, of_another_optimizer
from .update_rule import MASTER, in_fp32

_BUFFER = "momentum_buffer"


class SGD(KernelRule):
    """Without momentum in any group there is no state beside the master."""

    options = (
        Number("lr", 1e-3, rate=True),
        Number("momentum", 0.0),
        Number("dampening", 0.0),
        Number("weight_decay", 0.0),
        Flag("nesterov"),
        Flag("maximize"),
        DIFFERENTIABLE,
    )
    counterparts = frozenset(("SGD",))
    torch_options = MappingProxyType(torch.optim.SGD([torch.empty(0, device="cpu")]).defaults)
    needs_steps = False

    def __init__(self, **values: Any) -> None:
        super().__init__("sgd_plain", **values)
        self._momentum = float(self.defaults["momentum"])
        self._use("sgd" if self._momentum else "sgd_plain")

    def for_groups(self, groups: Sequence[Mapping[str, Any]]) -> SGD:
        made = copy.copy(self)
        made._momentum = max(float(group["momentum"]) for group in groups)
        made._use("sgd" if made._momentum else "sgd_plain")
        return made

    def check_group(self, number: int, group: Mapping[str, Any]) -> None:
        super().check_group(number, group)
        if group.get("nesterov") and not (group["momentum"] > 0 and group["dampening"] == 0):
            raise ValueError(f"nesterov of parameter group {number} needs a momentum above 0, and a dampening of 0")
        if group["momentum"] and self.kernel == "sgd_plain":
            raise ValueError(
                f"momentum of parameter group {number} is {group['momentum']!r}, and the optimizer was made without "
                "momentum in any group, so that it has no momentum buffers: make it with one"
            )

    def refuse_saved(self, number: int, group: Mapping[str, Any]) -> str | None:
        if "ns_steps" not in group:
            return None
        return (
            f"parameter group {number} of the state has ns_steps: it is of Muon, whose momentum means something else "
            "than SGD's. Load the model alone, and let the momentum begin anew"
        )

    def refuse_options(self, number: int, group: Mapping[str, Any]) -> str | None:
        return of_another_optimizer(number, group, "momentum", ("betas", "amsgrad"))

    @property
    def ulps_an_update(self) -> int:  # type: ignore[override]
        """Grows with the momentum: a rounding stays in the momentum buffer for 1 / (1 - momentum) updates."""
        return 8 + round(8 / max(1 - self._momentum, 2**-10))

    def size_of_update(self, state: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        """An update subtracts as much as gradients and momentum are large, times the rate."""
        buffer = state.get(_BUFFER, torch.zeros_like(gradient))
        gradient = gradient.abs() + float(group["weight_decay"]) * state[MASTER].abs()
        return float(group["lr"]) * (1 + self._momentum) * (gradient + buffer.abs())

    def update_in_float64(
        self, state: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any], step: float
    ) -> None:
        p, momentum = state[MASTER], float(group["momentum"])
        g = (-gradient if group.get("maximize") else gradient) + in_fp32(float(group["weight_decay"])) * p
        update = g
        if _BUFFER in state:
            buffer = state[_BUFFER]
            if step > 1 and momentum:
                buffer.mul_(in_fp32(momentum)).add_(g * in_fp32(1 - float(group["dampening"])))
            else:
                buffer.copy_(g)
            update = g + in_fp32(momentum) * buffer if group["nesterov"] else buffer
        p.sub_(in_fp32(float(group["lr"])) * update)
