"""State that was saved as a codec stores it, read as the logical fp32 tensors that it stands for.

Rows are counted in each slice of a parameter from its first element on, as the elements lie in memory::

    exp_avg of a [3, 100], cut in two along dimension 1     slice 0: 150 elements, 2 rows     slice 1: 150, 2 rows
    exp_avg_int8     |<------ 150 ------>|<------ 150 ------>|
    exp_avg_scale    |  0  |  1          |  2  |  3          |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zero_kernels import ROW

from ..params.arrangement import read_arranged, slice_counts
from ..rules.codec import CODECS, Codec
from ..rules.state_tensor import Per, StateTensor
from .index import PARAMETER, Index, Key, ReadRange, SavedTensor


@dataclass(frozen=True)
class EncodedTensor(SavedTensor):
    """A tensor that was stored by a codec. ``spec``: of the logical tensor.

    Attributes:
        codec: the codec.
        stored: the tensors that were saved, as the codec lists them.
    """

    codec: Codec
    stored: Sequence[SavedTensor]

    def ranges(self, start: int, length: int) -> Iterator[tuple[SavedTensor, int, int]]:
        for low, high, row in self._runs(start, start + length):
            yield from self._of_run(low, high, row)

    def read(self, target: Tensor, start: int, read: ReadRange) -> None:
        for low, high, row in self._runs(start, start + target.numel()):
            flats = []
            for part, first, length in self._of_run(low, high, row):
                flats.append(torch.empty(length, dtype=part.spec.dtype, device="cpu"))
                # The parameter may have been written with its elements in another order than its state.
                there = part.spec.arrangement
                here = self.spec.arrangement if part.spec.kind == PARAMETER else there
                read_arranged(flats[-1], first, part.spec.shape, (here, there), partial(read, part))
            values = self.codec.decode_flat(self._tensor, flats)
            first = max(start, low)
            target[first - start : high - start].copy_(values[first - low :])

    def _of_run(self, low: int, high: int, row: int) -> Iterator[tuple[SavedTensor, int, int]]:
        """Give what to read of each stored tensor for a run, whose first row is number ``row``."""
        for part, of in zip(self.stored, self.codec.read_of(self._tensor), strict=True):
            yield part, *((row, -(-(high - low) // ROW)) if of.per is Per.ROW else (low, high - low))

    @property
    def _tensor(self) -> StateTensor:
        return StateTensor(self.spec.kind)

    def _runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Give the runs that hold the elements ``start`` to ``end``, one a slice, each from the beginning of a row on:
        first element, end, and number of the first row."""
        begin, rows = 0, 0
        for count in self._slices():
            low, high = max(start, begin), min(end, begin + count)
            if low < high:
                first = (low - begin) // ROW
                yield begin + first * ROW, high, rows + first
            begin, rows = begin + count, rows + -(-count // ROW)

    def _slices(self) -> Sequence[int]:
        """Elements of each slice."""
        of_rows = next((part.spec.rows_of for part in self.stored if part.spec.rows_of is not None), None)
        return of_rows or slice_counts(self.spec.shape, self.spec.cut)


def codec_of(saved: SavedTensor) -> Codec | None:
    """Give the codec that ``saved`` was stored by; None: it holds the values themselves."""
    return saved.codec if isinstance(saved, EncodedTensor) else None


def decoded(index: Index) -> Index:
    """Put logical tensors in ``index`` in place of those that codecs have stored."""
    tensors: dict[Key, SavedTensor] = dict(index.tensors)
    for optimizer in index.optimizers:
        names = [name for group in optimizer.groups for name in group["params"]]
        for kind, codec_name in optimizer.codecs.items():
            codec = CODECS[codec_name]
            for name in names:
                keys = [(part.name, name) for part in codec.read_of(StateTensor(kind))]
                if keys[0] in index.tensors:
                    parts = [index.tensors[key] for key in keys if key in index.tensors]
                    spec = replace(parts[0].spec, kind=kind, dtype=torch.float32)
                    tensors[kind, name] = EncodedTensor(spec, (), codec, parts)
                    for part in codec.parts(StateTensor(kind)):
                        tensors.pop((part.name, name), None)
    return replace(index, tensors=tensors)
