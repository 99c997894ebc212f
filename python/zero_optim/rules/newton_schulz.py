"""The Newton-Schulz iteration: it brings the singular values of a matrix close to 1, by products of matrices alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import zero_kernels

from .options import check_choice, is_number

Step = tuple[float, float, float]
"""(a, b, c) of a step X <- a X + (b A + c A A) X, A being X X^T."""

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of torch's iteration. Singular values grow fast where they are small; most end between 0.6 and 1.25."""

POLAR_EXPRESS = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    )
)
"""Coefficients of six steps (Amsel et al., "The Polar Express", 2025), made for matrices 1 % larger. So where bf16
rounds a singular value to more than 1, it does not grow."""

OPTIONS = ("ns_coefficients", "ns_steps", "eps", "ns_gram", "ns_product")
"""Names of a rule's options of the iteration, in the order of ``orthogonalized``."""

TORCH, TRITON = PRODUCTS = ("torch", "triton")
"""The makers of symmetric products: torch makes all of each, or a kernel half of it, where that is faster."""

# Rows or columns, whichever are fewer, from which on the kernel is faster. On an H200 it made the iteration of 4096 x
# 4096 and 4096 x 11008 1.13 to 1.16 times as fast; squares of 2048 and less took longer than torch's.
TRITON_FROM = 4096

# Above so many columns a row, or rows a column, matrices go by the Gram form. From 1.5 on it takes fewer
# multiplications, up to 2 less than a tenth.
GRAM_FROM = 2

# A phase takes in another step while a direction that is all rounding has grown by this at most. It is chosen for
# torch's steps, each of which makes 11.9 of 1: two are together. With three, 82 of 10,000 matrices that
# ``tests/rules/test_newton_schulz.py`` makes had a singular value above 1.25, up to 400.
MOST_GROWTH = 12


def check(coefficients: Any, steps: Any, eps: Any, gram: Any, product: Any) -> None:
    """Raise ValueError for options that no iteration can have."""
    if type(steps) is not int or not 1 <= steps < 100:
        raise ValueError(f"ns_steps must be a number from 1 to 99, got {steps!r}")
    of_steps = isinstance(coefficients, tuple | list) and len(coefficients) == steps
    if not _are_three(coefficients) and not (of_steps and all(map(_are_three, coefficients))):
        raise ValueError(
            f"ns_coefficients must be three numbers, or three for each of ns_steps={steps}, got {coefficients!r}"
        )
    if not is_number(eps) or not eps > 0:
        raise ValueError(f"eps must be a number above 0, got {eps!r}")
    if type(gram) is not bool:
        raise ValueError(f"ns_gram must be True or False, got {gram!r}")
    check_choice("ns_product", product, PRODUCTS)


def orthogonalized(
    matrix: Tensor, coefficients: Sequence[Any], steps: int, eps: float, gram: bool = False, product: str = TORCH
) -> Tensor:
    """Make the singular values of ``matrix`` about 1: X <- a X + (b A + c A A) X, A being X X^T, step by step.

    Where a matrix is zero the result is zero. Without ``gram`` the operations are those of ``torch.optim.Muon``, one by
    one, but for the norm. That is added up within rows first: so it depends on no other matrix, and on no number of
    threads.

    Args:
        matrix: [rows, columns], or [n, rows, columns] of n matrices, of any floating dtype; it is not changed.
        coefficients: (a, b, c) of all steps; or of each its own.
        eps: the least norm that a matrix is divided by.
        gram: whether several steps of long matrices are made one polynomial of A, by which X is multiplied once. It is
            the same in exact arithmetic (Zhang et al., "Gram Newton-Schulz", 2026).
        product: one of ``PRODUCTS``, for symmetric products. Those of matrices below ``TRITON_FROM`` are torch's in any
            case.

    Returns bf16 of the same shape, in another memory format perhaps.
    """
    of_steps = listed(coefficients, steps)
    multiply, add_product = (torch.mm, torch.addmm) if matrix.dim() == 2 else (torch.bmm, torch.baddbmm)

    def of_torch(a: Tensor, b: Tensor, d: Tensor | None = None, **factors: Any) -> Tensor:
        return multiply(a, b) if d is None else add_product(d, a, b, **factors)

    # a b, or beta d + alpha a b, where that is symmetric in exact arithmetic.
    fused = product == TRITON and min(matrix.shape[-2:]) >= TRITON_FROM
    symmetric = zero_kernels.symmetric_product if fused else of_torch
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(torch.bfloat16, copy=True)
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    norm = torch.linalg.vector_norm(rows, dim=-2, keepdim=True).to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / norm.clamp(min=eps)
    for phase in phases(matrix.shape[-2], matrix.shape[-1], of_steps, gram):
        square = symmetric(x, x.mT)
        if len(phase) > 1:
            x = multiply(_polynomial(square, phase, symmetric), x)
        else:
            ((a, b, c),) = phase
            x = add_product(x, symmetric(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _polynomial(square: Tensor, phase: Sequence[Step], symmetric: Callable[..., Tensor]) -> Tensor:
    """Make the matrix that these steps multiply X by, of ``square`` = X X^T."""
    made = factor = _factor(square, phase[0], symmetric)
    for step in phase[1:]:
        square = symmetric(symmetric(square, factor), factor)
        factor = _factor(square, step, symmetric)
        made = symmetric(factor, made)
    return made


def _factor(square: Tensor, step: Step, symmetric: Callable[..., Tensor]) -> Tensor:
    """a I + b A + c A A, of A = ``square``."""
    a, b, c = step
    made = symmetric(square, square, square, beta=b, alpha=c)
    diagonal = made.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(diagonal.float() + a)  # added to bf16, torch would round a itself first
    return made


def phases(rows: int, columns: int, of_steps: Sequence[Step], gram: bool) -> list[list[Step]]:
    """Cut the steps for a matrix into phases, each of which multiplies X once. Without ``gram``, and where the matrix
    is not long, each step is one phase."""
    if not gram or max(rows, columns) <= GRAM_FROM * min(rows, columns):
        return [[step] for step in of_steps]
    cut: list[list[Step]] = []
    growth = math.inf
    for step in of_steps:
        if growth > MOST_GROWTH:
            cut.append([])
            growth = 1.0
        cut[-1].append(step)
        # Within a phase X X^T is not recomputed. So a direction that X does not have, but that rounding has put into
        # X X^T, grows by the square of each a, as a small singular value would.
        growth *= step[0] ** 2
    return cut


def multiplications(rows: int, columns: int, coefficients: Sequence[Any], steps: int, gram: bool) -> int:
    """Count the multiplications of the iteration of a matrix."""
    short, long = sorted((rows, columns))
    square, whole = short**3, short**2 * long
    cut = phases(rows, columns, listed(coefficients, steps), gram)
    return sum(2 * whole + (4 * len(phase) - 3) * square for phase in cut)


def listed(coefficients: Sequence[Any], steps: int) -> list[Step]:
    """List the coefficients of each step."""
    return [(a, b, c) for a, b, c in ([coefficients] * steps if _are_three(coefficients) else coefficients)]


def _are_three(numbers: Any) -> bool:
    several = isinstance(numbers, tuple | list) and len(numbers) == 3
    return several and all(is_number(number) and math.isfinite(number) for number in numbers)
