"""Parameters that are cut over ranks, made whole: each on one rank, its home.

Every rank sends its parts to their homes, and gets back what is made of them there::

    rank 0   a0 b0 c0  ── all-to-all ──>  a0 a1          ── all-to-all ──>  what a0 b0 c0 become
    rank 1   a1 b1 c1                     b0 b1, c0 c1                      what a1 b1 c1 become

So a rank sends and receives as much as it has of the parameters, twice, however many ranks there are.

Parts are of two kinds: at stage 3 flat ranges, of the shard group; and slices, of tensor-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import Comm
from .update_rule import CutParameter, Whole

TENSOR_ALL_TO_ALL = "tensor_all_to_all"
"""The kind of messages between tensor-parallel ranks, in the account of collectives."""
REPLICA_ALL_REDUCE = "replica_all_reduce"
"""The kind of messages between replicas there."""

# Elements of a rank that are made whole together, at least. Muon's take 8 bytes each meanwhile. On a GPU nobody has
# measured how long small messages take.
JOINED_ON_A_GPU, JOINED_ON_A_PROCESSOR = 2**24, 2**20

# Parameters that are made whole together, at least, for each rank. With one a rank, a parameter that is twice as dear
# would keep the other ranks waiting.
PARAMETERS_A_RANK = 4


class Size(NamedTuple):
    """The size of a shard: elements of a rank, and parameters, of all ranks together."""

    numel: int
    parameters: int


def batch_lengths(shards: Sequence[Size], ranks: int, device: torch.device) -> Iterator[int]:
    """Cut shards, in order, into batches whose parameters are made whole together: give the length of each. The last
    takes in a rest that would not be worth a batch. Sizes are the same on all ranks.

    ``ranks``: number of those that shard the parameters. ``device``: where parameters are made whole.
    """
    least = Size(JOINED_ON_A_PROCESSOR if device.type == "cpu" else JOINED_ON_A_GPU, PARAMETERS_A_RANK * ranks)
    rest = Size(sum(shard.numel for shard in shards), sum(shard.parameters for shard in shards))
    here, length = Size(0, 0), 0
    for numel, parameters in shards:
        here, length = Size(here.numel + numel, here.parameters + parameters), length + 1
        rest = Size(rest.numel - numel, rest.parameters - parameters)
        if all(size.numel >= least.numel and size.parameters >= least.parameters for size in (here, rest)):
            yield length
            here, length = Size(0, 0), 0
    yield length


class MatrixPiece(NamedTuple):
    """A part of ``whole``: ``length`` rows along ``dim``, from ``start`` on, in the tensor with this ``number``."""

    number: int
    whole: Whole
    dim: int
    start: int
    length: int

    @property
    def numel(self) -> int:
        return self.whole.numel // self.whole.shape[self.dim] * self.length

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """View the piece, in its shape."""
        of_whole = self.whole.shaped(self.whole.of(tensors[self.number]))
        return of_whole.narrow(self.dim, self.start, self.length)


class Joined(NamedTuple):
    """A parameter to be made whole.

    Attributes:
        whole: as its home has it.
        cost: of its update, in any unit.
        own: this rank's pieces of it, where they lie.
        all: every rank's pieces, each with its rank, and in the order of ``own``: where they belong in the whole.
    """

    whole: Whole
    cost: int
    own: Sequence[MatrixPiece]
    all: Sequence[tuple[int, MatrixPiece]]


def joined_parts(number: int, cut: CutParameter, cost: int, rank: int) -> Joined:
    """Describe a parameter of which shards have parts. ``number``: of this rank's shard. ``rank``: this one."""
    flat = cut.whole._replace(shape=torch.Size((cut.whole.numel,)), order=None)
    own = [
        MatrixPiece(number, flat._replace(start=part.in_shard, shape=torch.Size((part.numel,))), 0, 0, part.numel)
        for other, part in cut.parts
        if other == rank
    ]
    return Joined(
        cut.whole, cost, own, [(r, MatrixPiece(0, flat, 0, part.in_param, part.numel)) for r, part in cut.parts]
    )


def joined_slices(number: int, own: Whole, cost: int, rank: int) -> Joined:
    """Describe a parameter of which tensor-parallel ranks have slices: ``own`` is this rank's, in tensor ``number``.

    Tensor-parallel ranks have the same layout: slices of one parameter have the same home, or below stage 3 the same
    place in a bucket. So a row exchanges slices::

                         slice 0        slice 1
        data-parallel 0  a0 b0     <->  a1 b1       each of a and b is made whole on one of the two
        data-parallel 1  c0        <->  c1
    """
    joint = own.joint
    assert joint is not None
    whole = own._replace(start=0, shape=torch.Size(joint.shape), order=None, joint=None)
    here = [MatrixPiece(number, own, joint.dim, start, length) for _, start, length in joint.slices_of(rank) if length]
    there = [
        (other, MatrixPiece(0, whole, joint.dim, start, length))
        for other in range(len(joint.blocks[0]))
        for start, _, length in joint.slices_of(other)
        if length
    ]
    return Joined(whole, cost, here, there)


class _Side:
    """Pieces of some tensors that go to the ranks, or come from them.

    Args:
        by_rank: the pieces for each.

    Attributes:
        counts: elements for each rank.
    """

    def __init__(self, by_rank: Sequence[Sequence[MatrixPiece]]) -> None:
        self._pieces = [*itertools.chain.from_iterable(by_rank)]
        self._numels = [piece.numel for piece in self._pieces]
        self.counts = [sum(piece.numel for piece in pieces) for pieces in by_rank]

    def taken(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy all pieces of ``tensors`` into a message, one after another."""
        message = tensors[0].new_empty(sum(self.counts))
        parts, there = self._pairs(message, tensors)
        _copy(parts, there)
        return message

    def put(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write such a message into the pieces of ``tensors``."""
        parts, there = self._pairs(message, tensors)
        _copy(there, parts)

    def _pairs(self, message: Tensor, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        there = [piece.of(tensors) for piece in self._pieces]
        parts = message.split(self._numels)
        return [part.view(piece.shape) for part, piece in zip(parts, there, strict=True)], there


class MatrixHomes:
    """The homes of parameters, which make them whole: the dearest first, each goes to the rank that has least to do.

    Args:
        joined: in an order that all ranks have.
        ranks: over which they are cut.
        kind: of the messages, in the account.

    Attributes:
        wholes: the parameters whose home is this rank, one after another.
    """

    def __init__(self, joined: Sequence[Joined], ranks: Comm, kind: str) -> None:
        self._ranks, self._kind = ranks, kind
        self.wholes: list[Whole] = []
        self._numel = 0  # of all ``wholes``
        leaving: list[list[MatrixPiece]] = [[] for _ in range(ranks.world_size)]
        arriving: list[list[MatrixPiece]] = [[] for _ in range(ranks.world_size)]
        for of, home in zip(joined, _homes([of.cost for of in joined], ranks.world_size), strict=True):
            leaving[home] += of.own
            if home == ranks.rank:
                for rank, piece in of.all:
                    arriving[rank].append(piece._replace(whole=piece.whole._replace(start=self._numel)))
                self.wholes.append(of.whole._replace(start=self._numel))
                self._numel += of.whole.numel
        self._leaving, self._arriving = _Side(leaving), _Side(arriving)

    def bring(self, shards: Sequence[Tensor]) -> Tensor:
        """Collective. Make this rank's ``wholes``, [numel], of the parts in all ranks' ``shards``, flat tensors of one
        dtype."""
        answer = self._sent(shards, self._leaving, self._arriving)
        whole = answer.new_empty(self._numel)
        self._arriving.put(answer, [whole])
        return whole

    def give_back(self, whole: Tensor, shards: Sequence[Tensor]) -> None:
        """Collective. Send back into ``shards`` what the homes have made of their parameters."""
        self._leaving.put(self._sent([whole], self._arriving, self._leaving), shards)

    def _sent(self, source: Sequence[Tensor], sent: _Side, received: _Side) -> Tensor:
        """Exchange pieces, and return what all ranks have sent to this one, piece by piece."""
        message = sent.taken(source)
        return self._ranks.all_to_all(message, sent.counts, received.counts, self._kind)


class WorkSplit:
    """How ranks that have the same whole parameters divide the work: each parameter is updated by one of them, chosen
    as in ``MatrixHomes``.

    Each puts zeros in place of the parameters that it does not update, so that the sum over replicas is exact::

        replica 0   a b c  ──>  a' 0  0     ── all-reduce ──>  a' b' c'
        replica 1   a b c  ──>  0  b' c'                       a' b' c'

    Args:
        wholes: the parameters, by the tensor in which they lie.
        cost: gives that of an update, in any unit.
        ranks: that all have them; None: this rank alone does.

    Attributes:
        own: the parameters that this rank updates, by tensor as in ``wholes``.
    """

    def __init__(self, wholes: Sequence[Sequence[Whole]], cost: Callable[[Whole], int], ranks: Comm | None) -> None:
        every = [(number, whole) for number, of_tensor in enumerate(wholes) for whole in of_tensor if whole.numel]
        self.own, self._every = wholes, every
        self._ranks = ranks if every else None  # without parameters here no rank has any
        if self._ranks is None:
            return
        homes = _homes([cost(whole) for _, whole in every], self._ranks.world_size)
        self._made = [place for place, home in enumerate(homes) if home == self._ranks.rank]
        self._awaited = [place for place, home in enumerate(homes) if home != self._ranks.rank]
        own: list[list[Whole]] = [[] for _ in wholes]
        for number, whole in map(every.__getitem__, self._made):
            own[number].append(whole)
        self.own = own

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Copy the parameters that other ranks have updated into ``tensors``."""
        if self._ranks is None:
            return
        there = [whole.of(tensors[number]) for number, whole in self._every]
        numels = [whole.numel for _, whole in self._every]
        message = tensors[0].new_zeros(sum(numels))
        parts = message.split(numels)
        _copy([parts[place] for place in self._made], [there[place] for place in self._made])
        self._ranks.exchange(message, kind=REPLICA_ALL_REDUCE, alike=False)  # other shards have other matrices
        _copy([there[place] for place in self._awaited], [parts[place] for place in self._awaited])


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)


def _homes(costs: Sequence[int], ranks: int) -> list[int]:
    # Ties go to the first parameter and the first rank. All ranks have to choose alike, or they deadlock.
    loads, homes = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        homes[number] = loads.index(min(loads))
        loads[homes[number]] += costs[number]
    return homes
