"""Parameters that are cut over ranks, made whole: each on one rank, its home.

Every rank sends its parts to their homes, and gets back what is made of them there::

    rank 0   a0 b0 c0  ── all-to-all ──>  a0 a1          ── all-to-all ──>  what a0 b0 c0 become
    rank 1   a1 b1 c1                     b0 b1, c0 c1                      what a1 b1 c1 become

So a rank sends and receives as much as it has of the parameters, twice, however many ranks there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import Comm
from .update_rule import Cut


class _Piece(NamedTuple):
    """``numel`` elements, from ``start`` of a tensor on: of that with this ``number``."""

    number: int
    start: int
    numel: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.number].narrow(0, self.start, self.numel)


class Homes:
    """Which parameters each rank makes whole: the dearest first, each goes to the rank that has least to do.

    Args:
        cuts: of each shard, in an order that all ranks have.
        costs: of each of ``cuts``, shard after shard: how dear it is, in any unit.
        ranks: over which they are cut.

    Attributes:
        wholes: the parameters whose home is this rank, one after another.
    """

    def __init__(self, cuts: Sequence[Sequence[Cut]], costs: Sequence[int], ranks: Comm) -> None:
        self._ranks = ranks
        every = [(number, cut) for number, of_shard in enumerate(cuts) for cut in of_shard]
        at_home: list[list[tuple[int, Cut]]] = [[] for _ in range(ranks.world_size)]
        for place, home in zip(every, _homes(costs, ranks.world_size), strict=True):
            at_home[home].append(place)
        self._leaving = [
            [_Piece(number, part.in_shard, part.numel) for number, cut in places for part in [cut.parts[ranks.rank]]]
            for places in at_home
        ]
        own = [cut for _, cut in at_home[ranks.rank]]
        starts = [*itertools.accumulate((cut.whole.numel for cut in own), initial=0)]
        self._numel = starts.pop()
        self.wholes = [cut.whole._replace(start=start) for cut, start in zip(own, starts, strict=True)]
        pairs = [*zip(own, self.wholes, strict=True)]
        self._arriving = [
            [_Piece(0, whole.start + cut.parts[rank].in_param, cut.parts[rank].numel) for cut, whole in pairs]
            for rank in range(ranks.world_size)
        ]

    def bring(self, shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Collective. Give [numel] fp32, the ``wholes`` of what lies in ``shards``, [shard_numel] each, in the parts of
        all ranks. It is sent in ``dtype``."""
        whole = shards[0].new_empty(self._numel, dtype=torch.float32)
        self._exchange(shards, self._leaving, [whole], self._arriving, dtype)
        return whole

    def give_back(self, whole: Tensor, shards: Sequence[Tensor]) -> None:
        """Collective. Let ``shards`` have what the homes of their parameters have made of these, in fp32."""
        self._exchange([whole], self._arriving, shards, self._leaving, torch.float32)

    def _exchange(
        self,
        source: Sequence[Tensor],
        sent: Sequence[Sequence[_Piece]],
        target: Sequence[Tensor],
        received: Sequence[Sequence[_Piece]],
        dtype: torch.dtype,
    ) -> None:
        """``sent`` and ``received``: by rank."""
        counts, of_each = ([sum(piece.numel for piece in of_rank) for of_rank in by] for by in (sent, received))
        message = source[0].new_empty(sum(counts), dtype=dtype)
        for here, piece in _along(message, sent):
            here.copy_(piece.of(source))
        for here, piece in _along(self._ranks.all_to_all(message, counts, of_each), received):
            piece.of(target).copy_(here)


def _along(message: Tensor, pieces: Sequence[Sequence[_Piece]]) -> Iterator[tuple[Tensor, _Piece]]:
    """The part of a message that each piece is."""
    start = 0
    for piece in itertools.chain.from_iterable(pieces):
        yield message.narrow(0, start, piece.numel), piece
        start += piece.numel


def _homes(costs: Sequence[int], ranks: int) -> list[int]:
    """Give each a rank."""
    loads, homes = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        homes[number] = loads.index(min(loads))
        loads[homes[number]] += costs[number]
    return homes
