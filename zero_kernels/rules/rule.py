"""What an update rule is: its state, its coefficients, its columns of the hyper table, and its arithmetic in torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_kernels.hyper import PADDING, STEP_NUMBER

STEP_BITS = 32
"""Bits of a step count that `power` looks at."""

Coefficients = Mapping[str, Tensor]
States = Sequence[Tensor]
Update = Callable[[Tensor, Tensor, States, Coefficients], tuple[Tensor, States]]


@dataclass(frozen=True)
class Rule:
    """An update rule: what `foreach_step` runs by its name, or what `update_rows` runs of anybody's.

    Attributes:
        name: of the rule.
        states: names of the state tensors of a shard, in order. Those of the built-in rules are fp32 [numel].
        coefficients: names of the numbers from which a row of the table is made.
        columns: of the table, made by `columns_of`.
        table: (coefficients, step) → columns. Both, and the result, are fp64 [slots]. Gives the rule's own columns,
            and `grad_factor`, which is 1 where it is not given.
        update: (g, p, states, c) → (p, states). g and p are fp32 [rows, 128]; c has [rows, 1] for each column. g is the
            gradient times `grad_scale * grad_factor`. It returns new tensors, and writes none.
    """

    name: str
    states: tuple[str, ...]
    coefficients: tuple[str, ...]
    columns: tuple[str, ...]
    table: Callable[[Coefficients, Tensor], Mapping[str, Tensor]]
    update: Update

    def fill_table(
        self, coefficients: Tensor, group: Tensor | None, step: Tensor, active: Tensor | None, out: Tensor
    ) -> None:
        """Make rows of the table that the rule reads: in float64, each column rounded once. Reads nothing on the host.

        Args:
            coefficients: fp64 [len(self.coefficients), groups].
            group: int32 [slots], the column of `coefficients` that a slot uses; None: slot i uses column i.
            step: fp64 [slots], whole numbers from 1 on: the step being made.
            active: bool [slots]; None: all are.
            out: fp32 [slots, len(self.columns)], written.
        """
        of_slot = coefficients if group is None else coefficients.index_select(1, group)
        made = dict(self.table(dict(zip(self.coefficients, of_slot, strict=True)), step))
        made["active"] = torch.ones_like(step) if active is None else active.double()
        made.setdefault("grad_factor", torch.ones_like(step))
        made[STEP_NUMBER] = step
        made.setdefault(PADDING, torch.zeros_like(step))
        out.copy_(torch.stack([made[name] for name in self.columns], dim=-1))


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """base^exponent by squaring: a product in one fixed order, which a library's pow does not promise."""
    bits, result, square = exponent.to(torch.int64), torch.ones_like(base), base
    for bit in range(STEP_BITS):
        result = torch.where((bits >> bit) & 1 == 1, result * square, result)
        square = square * square
    return result


def square_root(x: Tensor) -> Tensor:
    """Root of fp32, correctly rounded: torch's own is not on a CPU, but through float64 it is."""
    return x.double().sqrt().float()


def larger_magnitude(a: Tensor, b: Tensor) -> Tensor:
    """The larger of |a| and |b|, compared as bit patterns: so NaN is above inf, and stays."""
    return torch.maximum(a.abs().view(torch.int32), b.abs().view(torch.int32)).view(torch.float32)


def sign(x: Tensor) -> Tensor:
    """1, -1, or x itself where it is neither above nor below 0: so NaN stays."""
    return torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x))
