"""The model of ``scale``: the shapes of Llama 2 70B and 7B as integers, and small tensors a 4096th of their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from zero_optim.params.layout import BucketLayout, bucket_capacities, build_layout

ITEMSIZE = 2  # bf16
SHRINK = 4096
"""The model that is timed has as many parameters, each with 1/4096 of the elements: 17 million, not 69 billion."""


@dataclass(frozen=True)
class Shapes:
    """A decoder of ``layers`` blocks, with grouped-query attention. ``kv``: the width of keys, and of values."""

    layers: int
    hidden: int
    ffn: int
    kv: int
    vocab: int

    @property
    def block_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix of a block: query, key, value, output; gate, up, down."""
        attention = [(width, self.hidden) for width in (self.hidden, self.kv, self.kv, self.hidden)]
        return [*attention, *[(self.ffn, self.hidden)] * 2, (self.hidden, self.ffn)]

    @property
    def block(self) -> list[int]:
        """Elements of each parameter of a block: its matrices, then two norms."""
        return [*(rows * columns for rows, columns in self.block_matrices), self.hidden, self.hidden]

    @property
    def root(self) -> list[int]:
        """Elements of each parameter outside of the blocks: embedding, last norm, head."""
        return [self.vocab * self.hidden, self.hidden, self.vocab * self.hidden]

    @property
    def numels(self) -> list[int]:
        """Elements of all parameters, in the order in which they are used."""
        embedding, *last = self.root
        return [embedding, *self.block * self.layers, *last]


LLAMA_7B = Shapes(layers=32, hidden=4096, ffn=11008, kv=4096, vocab=32000)
LLAMA_70B = Shapes(layers=80, hidden=8192, ffn=28672, kv=1024, vocab=32000)


def capacity(shapes: Shapes, ranks: int) -> int:
    """Compute the elements that a bucket may hold by default, at stages 1 and 2."""
    numels = dict(enumerate(shapes.numels))
    return bucket_capacities(numels, dict.fromkeys(numels, 0), None, {0: ITEMSIZE}, ranks)[0]


def layouts(shapes: Shapes, ranks: int, stage: int) -> list[BucketLayout]:
    """Lay out buckets of the true shapes: at stage 3 one for each block and one for the rest. Allocates nothing."""
    if stage == 3:
        units = [shapes.root, *[shapes.block] * shapes.layers]
        return [bucket for unit in units for bucket in _filled(unit, 2**63, ranks)]
    return _filled(shapes.numels[::-1], capacity(shapes, ranks), ranks)


def _filled(numels: Sequence[int], room: int, ranks: int) -> list[BucketLayout]:
    indexed = dict(enumerate(numels))
    return build_layout(indexed, dict.fromkeys(indexed, 0), list(indexed), {0: room}, ranks)


def cap_mb(shapes: Shapes, ranks: int) -> float:
    """Choose ``bucket_cap_mb`` for the small tensors: buckets get the same parameters as by default in true shapes."""
    return capacity(shapes, ranks) * ITEMSIZE / SHRINK / 2**20


class Values(nn.Module):
    """Parameters of 1/SHRINK of ``numels`` elements, each of which the forward uses once."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        small = [numel // SHRINK for numel in numels]
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for numel in small])

    def forward(self, x: Tensor) -> Tensor:
        for value in self.values:
            x = x + value.sum()
        return x


class Block(Values):
    """A unit at stage 3."""


class Small(nn.Module):
    """The model that is timed."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        embedding, *last = shapes.root
        self.embedding = Values([embedding])
        self.blocks = nn.ModuleList(Block(shapes.block) for _ in range(shapes.layers))
        self.last = Values(last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out
