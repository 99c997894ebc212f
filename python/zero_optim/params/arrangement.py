"""The order in which flat ranges of a tensor are counted: slice by slice, and within a slice as it lies in memory.

A slice along another dimension than 0 is no flat range of the whole tensor: two slices of a [2, 4]::

    whole            0 1 2 3          slices, one after another     0 1 | 4 5
                     4 5 6 7                                        2 3 | 6 7      (elements, by their numbers there)

Cut along dimension 0, slices follow each other in whole order anyway: there is no ``Cut`` then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .storage_order import StorageOrder, flat_of, view_of

Read = Callable[[Tensor, int], None]
"""Fills a flat tensor with the elements from a number on."""


@dataclass(frozen=True)
class Cut:
    """A tensor's cut into slices: along ``dim``, of ``sizes`` rows each, in the order of the ranks."""

    dim: int
    sizes: tuple[int, ...]

    def start(self, number: int) -> int:
        """Count the rows of the slices before number ``number``."""
        return sum(self.sizes[:number])

    def shape(self, of: Sequence[int], number: int) -> tuple[int, ...]:
        """The shape of one slice of a tensor of shape ``of``."""
        return (*of[: self.dim], self.sizes[number], *of[self.dim + 1 :])


def slice_counts(shape: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Elements of each slice of a tensor of ``shape``."""
    return (prod(shape),) if cut is None else tuple(prod(cut.shape(shape, n)) for n in range(len(cut.sizes)))


@dataclass(frozen=True)
class Arrangement:
    """``order``: of each slice, see ``storage_order``. ``cut``: None: the tensor is one slice."""

    order: StorageOrder = None
    cut: Cut | None = None


WHOLE = Arrangement()
"""The arrangement of a contiguous whole, as in a file of one whole tensor."""


@dataclass(frozen=True)
class _Slice:
    """A slice of a tensor, ``size`` rows from ``at`` on along ``dim``; its first element is number ``start``."""

    shape: tuple[int, ...]
    start: int
    dim: int
    at: int
    order: StorageOrder

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of a row of dimension 0."""
        return prod(self.shape[1:])

    @property
    def end(self) -> int:
        """The row behind its last one, along ``dim``."""
        return self.at + self.shape[self.dim]


def _slices(shape: Sequence[int], arrangement: Arrangement) -> Iterator[_Slice]:
    cut, start = arrangement.cut, 0
    for number in range(1 if cut is None else len(cut.sizes)):
        own = tuple(shape) if cut is None else cut.shape(shape, number)
        dim, at = (0, 0) if cut is None else (cut.dim, cut.start(number))
        yield _Slice(own, start, dim, at, arrangement.order)
        start += prod(own)


def read_arranged(
    target: Tensor, start: int, shape: Sequence[int], arranged: tuple[Arrangement, Arrangement], read: Read
) -> None:
    """Fill ``target``, a flat range of a tensor in one arrangement, from the tensor in another.

    Args:
        target: [length] the elements from ``start`` on.
        shape: of the whole tensor.
        arranged: the arrangement of ``target``, and that in which ``read`` counts.
    """
    here, there = arranged
    if here == there or not target.numel():
        read(target, start)
        return
    for wanted in _slices(shape, here):
        low, high = max(start, wanted.start), min(start + target.numel(), wanted.start + wanted.numel)
        if low >= high:
            continue
        first, end = (low - wanted.start) // wanted.row, -(-(high - wanted.start) // wanted.row)
        rows = _read_rows(wanted, first, end, list(_slices(shape, there)), target, read)
        flat = flat_of(rows, wanted.order)
        target[low - start : high - start].copy_(flat.narrow(0, low - wanted.start - first * wanted.row, high - low))


def _read_rows(wanted: _Slice, first: int, end: int, slices: Sequence[_Slice], like: Tensor, read: Read) -> Tensor:
    """Read rows ``first`` to ``end`` of dimension 0 of a slice: in every order, whole rows are a flat range."""
    parts, same_cut = [], slices[0].dim == wanted.dim
    for of in slices:
        if same_cut and (of.end <= wanted.at or of.at >= wanted.end) or not of.row:
            continue
        flat = like.new_empty((end - first) * of.row)
        read(flat, of.start + first * of.row)
        parts.append((of, view_of(flat, (end - first, *of.shape[1:]), of.order)))
    rows = torch.cat([part for _, part in parts], slices[0].dim) if len(parts) > 1 else parts[0][1]
    if not wanted.dim:
        return rows
    return rows.narrow(wanted.dim, wanted.at - (parts[0][0].at if same_cut else 0), wanted.shape[wanted.dim])
