"""Lion: the sign of an interpolated momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .kernel_rule import KernelRule
from .options import Betas, Flag, Number, of_another_optimizer


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

    def __init__(self, **values: Any) -> None:
        super().__init__("lion", **values)

    def refuse_options(self, number: int, group: Mapping[str, Any]) -> str | None:
        return of_another_optimizer(number, group, "betas", ("momentum", "dampening", "nesterov"))
