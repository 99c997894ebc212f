"""The matrices of a parameter, for a rule that makes matrices orthogonal.

By its shape, first::

    2 dimensions    [rows, columns]                one matrix
    3               [experts, rows, columns]       one for each expert
    4 and 5         [out, in, height, width]       a convolution: one of [out, in * height * width]

By ``view`` of a parameter group each of them is several, side by side::

    {"params": q, "view": {"rows": 12}}                  12 equal blocks of rows, such as heads
    {"params": qkv, "view": {"rows": (768, 256, 256)}}   blocks of so many rows
    {"params": out, "view": {"columns": 12}}             12 equal blocks of columns
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .options import Option

VIEW = "view"
"""The option's name."""

ROWS, COLUMNS = "rows", "columns"
_DIMS = {ROWS: 1, COLUMNS: 2}
"""The dimension of [matrices, rows, columns] that a view cuts, by its key."""


@dataclass(frozen=True)
class MatrixView(Option):
    """``view`` of a parameter group: None, or ``{"rows": blocks}`` or ``{"columns": blocks}``, where ``blocks`` is the
    number of equal ones, or the length of each."""

    stays: bool = field(default=True, kw_only=True)
    optional = True
    coefficients = ()

    def check(self, value: Any, owner: str) -> None:
        if value is None:
            return
        cut, blocks = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else (None, ())
        lengths = blocks if isinstance(blocks, tuple | list) else [blocks]
        if cut not in _DIMS or not lengths or not all(type(length) is int and length > 0 for length in lengths):
            raise ValueError(
                f"{self.name} of {owner} must be None, {{'rows': blocks}} or {{'columns': blocks}}, and blocks the "
                f"number of equal ones, or the length of each; got {value!r}"
            )


def matrices_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Give (matrices, rows, columns) of a parameter of 2 to 5 dimensions: the same elements in the same order."""
    if len(shape) == 3:
        return (shape[0], shape[1], shape[2])
    return (1, shape[0], math.prod(shape[1:]))


def refuse_view(shape: Sequence[int], view: Mapping[str, Any] | None) -> str | None:
    """Return why a parameter of this shape has no such matrices, and what to do. None: it has."""
    if not 2 <= len(shape) <= 5:
        return (
            f"has {len(shape)} dimensions, and Muon makes matrices orthogonal: give it to a group with another rule, "
            '{"params": others, "rule": rules.AdamW()}, as embeddings, heads, norms and biases. '
            "ShardedMuon.split(model) sorts them"
        )
    if view is None:
        return None
    ((cut, blocks),) = view.items()
    length = matrices_of(shape)[_DIMS[cut]]
    fits = length % blocks == 0 if isinstance(blocks, int) else length == sum(blocks)
    if fits:
        return None
    wanted = f"a number that divides {length}" if isinstance(blocks, int) else f"lengths that add up to {length}"
    return f"has {length} {cut} by its shape {tuple(shape)}, and its group has view={dict(view)!r}: give {wanted}"


def blocks_of(matrices: Tensor, view: Mapping[str, Any] | None) -> list[Tensor]:
    """Cut ``matrices``, contiguous [matrices, rows, columns], into those that ``view`` names: views [n, rows, columns]
    of n matrices, each of which is to be made orthogonal by itself."""
    if view is None:
        return [matrices]
    ((cut, blocks),) = view.items()
    count, length, columns = matrices.shape
    if cut == ROWS and isinstance(blocks, int):
        return [matrices.view(count * blocks, length // blocks, columns)]
    lengths = matrices.shape[_DIMS[cut]] // blocks if isinstance(blocks, int) else [*blocks]
    return list(matrices.split(lengths, _DIMS[cut]))


def shapes_of(shape: Sequence[int], view: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    """Give (rows, columns) of each of ``blocks_of``, for a parameter of this shape."""
    _, rows, columns = matrices_of(shape)
    if view is None:
        return [(rows, columns)]
    ((cut, blocks),) = view.items()
    length = rows if cut == ROWS else columns
    lengths = [length // blocks] * (1 if cut == ROWS else blocks) if isinstance(blocks, int) else blocks
    return [(block, columns) if cut == ROWS else (rows, block) for block in lengths]
