"""Rules with kernels of their own on every backend: the op ``foreach_step`` runs them. AdamW, Lion, SGD.

AdamW (Loshchilov and Hutter, 2019), Adam with L2 in the gradient (Kingma and Ba, 2015), and AMSGrad of either (Reddi,
Kale and Kumar, 2018). Lion: the sign of an interpolated momentum (Chen et al., "Symbolic Discovery of Optimization
Algorithms", 2023). SGD with momentum, of Nesterov's kind or not, as ``torch.optim.SGD`` has it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

import zero_kernels

from .codec import Begins, StateTensor
from .options import Betas, Differentiable, Fixed, Flag, Number
from .update_rule import MASTER, ShardUpdate, UpdateRule, lists_of, parts_of

Kernel = TypeVar("Kernel", bound="KernelRule")


class KernelRule(UpdateRule):
    """A rule whose table and update are those of a kernel.

    Args:
        kernel: its name in ``zero_kernels.RULES``, which lists the state beside the master.
    """

    # Set by ``prepared``: the op, and names of the stored tensors that it is given.
    _step: zero_kernels.Prepared
    _master: str
    _states: list[str]
    _scales: list[str]

    def __init__(self, kernel: str, **values: Any) -> None:
        super().__init__(**values)
        self._use(kernel)

    def _use(self, kernel: str) -> None:
        self.kernel, self._of_kernel = kernel, zero_kernels.RULES[kernel]
        self.tensors = (StateTensor(MASTER, Begins.PARAMETER), *map(StateTensor, self._of_kernel.states))

    @property
    def columns(self) -> tuple[str, ...]:
        return self._of_kernel.columns

    @property
    def coefficients(self) -> tuple[str, ...]:
        return self._of_kernel.coefficients

    def prepared(self: Kernel) -> Kernel:
        made = super().prepared()
        made._step = zero_kernels.Prepared("foreach_step")
        names = (MASTER, *self._of_kernel.states)
        (master, *_), *states = (parts_of(self.codecs, StateTensor(name)) for name in names)
        made._master, made._states = master.name, [parts[0].name for parts in states]
        made._scales = [part.name for parts in states for part in parts[1:]]
        return made

    def _as_kernel(self) -> zero_kernels.Rule:
        return self._of_kernel

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        *lists, row_keys = lists_of(shards, self._master, self._states)
        scales = [shard.state[name] for shard in shards for name in self._scales]
        self._step(self.kernel, *lists, scales or None, row_keys)


class AdamW(KernelRule):
    """``decoupled``: False is Adam. ``amsgrad``: divide by the root of the largest second moment so far."""

    options = (
        Number("lr", 1e-3, rate=True),
        Betas("betas", (0.9, 0.999)),
        Number("eps", 1e-8),
        Number("weight_decay", 1e-2),
        Flag("maximize"),
        Fixed("amsgrad"),
        Differentiable(),
    )
    counterparts = frozenset(("Adam", "AdamW"))
    own_option, foreign_options = "betas", ("momentum", "dampening", "nesterov")
    nonnegative = frozenset(("exp_avg_sq", "max_exp_avg_sq"))
    torch_options = MappingProxyType(torch.optim.AdamW([torch.empty(0, device="cpu")]).defaults)

    def __init__(self, decoupled: bool = True, **values: Any) -> None:
        super().__init__("amsgrad" if values.get("amsgrad") else "adamw", **values)
        self.decoupled = decoupled

    @property
    def described(self) -> dict[str, Any]:
        return {"decoupled_weight_decay": self.decoupled}

    def refuse_saved(self, number: int, group: Mapping[str, Any]) -> str | None:
        if group.get("weight_decay") and group.get("decoupled_weight_decay", self.decoupled) != self.decoupled:
            return (
                f"group {number} of the state was trained with decoupled_weight_decay={not self.decoupled}: give that "
                "to this optimizer's constructor"
            )
        return None

    def read_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        lr, beta1, beta2, eps, weight_decay, *others = super().read_groups(groups)
        return [lr, beta1, beta2, eps, weight_decay, [float(self.decoupled)] * len(groups), *others]

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        torch.ops.zero_kernels.hyper_table(by_group, group_of, steps, active, table)


class Lion(KernelRule):
    """One momentum: 4 bytes a parameter less than AdamW. Use a learning rate 3 to 10 times smaller than AdamW's, and a
    weight decay as many times larger."""

    options = (
        Number("lr", 1e-4, rate=True),
        Betas("betas", (0.9, 0.99)),
        Number("weight_decay", 0.0),
        Flag("maximize"),
    )
    own_option, foreign_options = "betas", ("momentum", "dampening", "nesterov")
    needs_steps = False

    def __init__(self, **values: Any) -> None:
        super().__init__("lion", **values)


class SGD(KernelRule):
    """Without momentum in any group there is no state beside the master."""

    options = (
        Number("lr", 1e-3, rate=True),
        Number("momentum", 0.0),
        Number("dampening", 0.0),
        Number("weight_decay", 0.0),
        Flag("nesterov"),
        Flag("maximize"),
        Differentiable(),
    )
    counterparts = frozenset(("SGD",))
    own_option, foreign_options = "momentum", ("betas", "amsgrad")
    torch_options = MappingProxyType(torch.optim.SGD([torch.empty(0, device="cpu")]).defaults)
    needs_steps = False

    def __init__(self, **values: Any) -> None:
        super().__init__("sgd" if values.get("momentum") else "sgd_plain", **values)

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
