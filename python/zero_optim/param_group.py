"""From ``param_groups`` on the host to one row of coefficients a parameter on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import zero_kernels

_COLUMNS = ("lr", "beta1", "beta2", "eps", "weight_decay")


def _coefficients(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (group["lr"], *group["betas"], group["eps"], group["weight_decay"])


class HyperTable:
    """Step counts and coefficients of every parameter; nothing of it is read back by the host.

    Attributes:
        steps: [parameters] float64, updates that each parameter has had. Skipped steps do not count.
        table: [parameters, len(zero_kernels.HYPER_COLUMNS)] fp32, what ``adam_step`` reads.
    """

    def __init__(self, group_of: Sequence[int], groups: int, device: torch.device, *, decoupled: bool) -> None:
        self.device = device
        self._decoupled = torch.tensor(float(decoupled), dtype=torch.float64, device=device)
        self.steps = torch.zeros(len(group_of), dtype=torch.float64, device=device)
        self.table = torch.zeros(len(group_of), len(zero_kernels.HYPER_COLUMNS), device=device)
        self._group_of = torch.tensor(group_of, device=device)
        self._by_group = torch.zeros(len(_COLUMNS), groups, dtype=torch.float64, device=device)
        self._by_parameter = torch.zeros(len(_COLUMNS), len(group_of), dtype=torch.float64, device=device)
        self._values: list[tuple[float | None, ...]] = []

    def advance(self, groups: Sequence[Mapping[str, Any]], active: Tensor) -> None:
        """Count a step for every ``active`` parameter ([parameters] bool) and make the table for it."""
        self._read_groups(groups)
        self.steps += active
        lr, beta1, beta2, eps, weight_decay = self._by_parameter
        zero_kernels.hyper_table(
            lr,
            (beta1, beta2),
            eps,
            weight_decay,
            self.steps,
            decoupled=self._decoupled,
            active=active,
            device=self.device,
            out=self.table,
        )

    def _read_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Bring changed coefficients to the device. One that is a tensor is copied there every step, unread."""
        rows = [_coefficients(group) for group in groups]
        tensors = [
            (column, number, value)
            for number, row in enumerate(rows)
            for column, value in enumerate(row)
            if isinstance(value, Tensor)
        ]
        values = [tuple(None if isinstance(value, Tensor) else float(value) for value in row) for row in rows]
        if values == self._values and not tensors:
            return
        self._values = values
        columns = [[value or 0.0 for value in column] for column in zip(*values, strict=True)]
        pinned = torch.tensor(columns, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        self._by_group.copy_(pinned, non_blocking=True)
        for column, number, value in tensors:
            self._by_group[column, number].copy_(value.reshape(()), non_blocking=True)
        torch.index_select(self._by_group, 1, self._group_of, out=self._by_parameter)
