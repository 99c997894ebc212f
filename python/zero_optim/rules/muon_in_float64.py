"""Muon's update of a matrix in exact arithmetic, for ``verify``: written anew, by singular values.

A step of the iteration turns X = U S V^T into U (a S + b S^3 + c S^5) V^T. So the singular vectors stay, and all steps
together make U p(S) V^T, where p is a polynomial of a polynomial, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .matrix_view import VIEW, blocks_of, matrices_of
from .newton_schulz import Step, phases
from .update_rule import MASTER, in_fp32


@dataclass(frozen=True)
class MuonInFloat64:
    """See ``MatricesInFloat64``.

    Attributes:
        buffer: the name of the momentum.
        coefficients: (a, b, c) of each step of the iteration.
        eps: the least norm that a matrix is divided by.
        gram: whether several steps of long matrices are one polynomial, which is rounded in another way.
        adjust_lr_fn: how the rate depends on a matrix's shape.
    """

    buffer: str
    coefficients: Sequence[Step]
    eps: float
    gram: bool
    adjust_lr_fn: str | None

    def begin(self, state: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        lr, momentum, decay = (float(group[name]) for name in ("lr", "momentum", "weight_decay"))
        state[MASTER].mul_(in_fp32(1 - lr * decay))
        buffer = state[self.buffer].lerp_(gradient, in_fp32(1 - momentum))
        return torch.lerp(gradient, buffer, in_fp32(momentum)) if group["nesterov"] else buffer.clone()

    def matrices(self, parameter: Tensor, group: Mapping[str, Any]) -> list[Tensor]:
        whole = parameter.reshape(matrices_of(parameter.shape))
        return [matrix for block in blocks_of(whole, group.get(VIEW)) for matrix in block]

    def subtracted(self, matrix: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        rate = in_fp32(float(group["lr"])) * self._scale(*matrix.shape)
        return self._exact(matrix) * rate, self._rounded(matrix) * rate

    def _exact(self, matrix: Tensor) -> Tensor:
        u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
        s = s / max(float(torch.linalg.matrix_norm(matrix)), self.eps)
        for a, b, c in self.coefficients:
            s = a * s + b * s**3 + c * s**5
        return (u * s) @ vt

    def _rounded(self, matrix: Tensor) -> Tensor:
        """The iteration itself, with the result of every product rounded to bf16."""
        tall = matrix.shape[0] > matrix.shape[1]
        x = _in_bf16(matrix.mT if tall else matrix)
        x = _in_bf16(x / _in_bf16(torch.linalg.matrix_norm(x)).clamp(min=self.eps))
        for phase in phases(len(matrix), matrix.shape[1], self.coefficients, self.gram):
            gram = _in_bf16(x @ x.mT)
            if len(phase) > 1:
                x = _in_bf16(_rounded_factor(gram, phase) @ x)
            else:
                ((a, b, c),) = phase
                x = _in_bf16(a * x + _in_bf16(b * gram + c * gram @ gram) @ x)
        return x.mT if tall else x

    def _scale(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        ratio = rows / columns
        return math.sqrt(ratio if self.adjust_lr_fn == "spectral_unclamped" else max(ratio, 1.0))


def _rounded_factor(gram: Tensor, steps: Sequence[Step]) -> Tensor:
    """Make the matrix that these steps multiply X by, of ``gram`` = X X^T: the product of a factor for each step. The
    next X X^T is this one between two such factors."""
    product = identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    for a, b, c in steps:
        factor = _in_bf16(a * identity + _in_bf16(b * gram + c * gram @ gram))
        product = _in_bf16(factor @ product)
        gram = _in_bf16(_in_bf16(gram @ factor) @ factor)
    return product


def _in_bf16(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16).double()
