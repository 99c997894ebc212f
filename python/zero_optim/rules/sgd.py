"""SGD with momentum, of Nesterov's kind or not, as ``torch.optim.SGD`` has it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from .kernel_rule import KernelRule
from .options import DIFFERENTIABLE, Flag, Number, of_another_optimizer

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
        self._use("sgd" if self.defaults["momentum"] else "sgd_plain")

    def for_groups(self, groups: Sequence[Mapping[str, Any]]) -> SGD:
        made = copy.copy(self)
        made._use("sgd" if any(float(group["momentum"]) for group in groups) else "sgd_plain")
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
