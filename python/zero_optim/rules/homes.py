"""Parameters that are cut over ranks, made whole: each on one rank, its home.

Every rank sends its parts to their homes, and gets back what is made of them there::

    rank 0   a0 b0 c0  ── all-to-all ──>  a0 a1          ── all-to-all ──>  what a0 b0 c0 become
    rank 1   a1 b1 c1                     b0 b1, c0 c1                      what a1 b1 c1 become

So a rank sends and receives as much as it has of the parameters, twice, however many ranks there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import Comm
from .update_rule import Cut, Whole


class _Piece(NamedTuple):
    """``numel`` elements, from ``start`` on, of the tensor with this ``number``."""

    number: int
    start: int
    numel: int


class _Side:
    """Pieces of some tensors that go to the ranks, or come from them.

    Args:
        by_rank: the pieces for each.

    Attributes:
        counts: elements for each rank.
    """

    def __init__(self, by_rank: Sequence[Sequence[_Piece]]) -> None:
        self._pieces = [*itertools.chain.from_iterable(by_rank)]
        self.counts = [sum(piece.numel for piece in pieces) for pieces in by_rank]

    def pairs(self, message: Tensor, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Cut ``message``, which has all pieces one after another, into these; and the pieces of ``tensors``: views."""
        there = [tensors[number].narrow(0, start, numel) for number, start, numel in self._pieces]
        return [*message.split([piece.numel for piece in self._pieces])], there


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
        self.wholes: list[Whole] = []
        self._numel = 0  # of all ``wholes``
        leaving: list[list[_Piece]] = [[] for _ in range(ranks.world_size)]
        arriving: list[list[_Piece]] = [[] for _ in range(ranks.world_size)]
        every = [(number, cut) for number, of_shard in enumerate(cuts) for cut in of_shard]
        for (number, cut), home in zip(every, _homes(costs, ranks.world_size), strict=True):
            leaving[home] += [_Piece(number, own.in_shard, own.numel) for rank, own in cut.parts if rank == ranks.rank]
            if home == ranks.rank:
                for rank, part in cut.parts:
                    arriving[rank].append(_Piece(0, self._numel + part.in_param, part.numel))
                self.wholes.append(cut.whole._replace(start=self._numel))
                self._numel += cut.whole.numel
        self._leaving, self._arriving = _Side(leaving), _Side(arriving)

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
        self, source: Sequence[Tensor], sent: _Side, target: Sequence[Tensor], received: _Side, dtype: torch.dtype
    ) -> None:
        message = source[0].new_empty(sum(sent.counts), dtype=dtype)
        _copy(*sent.pairs(message, source))
        answer = self._ranks.all_to_all(message, sent.counts, received.counts)
        parts, there = received.pairs(answer, target)
        _copy(there, parts)


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)


def _homes(costs: Sequence[int], ranks: int) -> list[int]:
    """Give each a rank."""
    loads, homes = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        homes[number] = loads.index(min(loads))
        loads[homes[number]] += costs[number]
    return homes
