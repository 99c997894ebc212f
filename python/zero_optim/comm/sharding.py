"""Who shares what: the ranks that hold parts of the same state, those that repeat it, and the scale of an average.

Tensors that are shared go through a ``Sharding``: other rooms ask for "reduce this", "gather that", and who takes part
is decided here. What all ranks agree on, such as errors and orders, goes over ``everyone``. As a rule the ranks that
share are all ranks, and nobody repeats. In a ``Grid`` those of a row share, and a reduction goes on across the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from .chain import Chain, ChainQueue, issue_behind
from .collectives import Comm, Pending
from .grid import Grid, Rows

_TOGETHER_BYTES = 25 * 2**20
"""Tensors are copied into one flat tensor of at most that size for a broadcast: a larger one goes as it is."""


@dataclass(frozen=True)
class Sharding:
    """Splits state, gradients and parameters over ranks, and communicates what that needs.

    A stage is a comparison: 0 nothing, >= 1 optimizer state, >= 2 gradients, >= 3 parameters.

    Attributes:
        everyone: all ranks that train together: those that agree, fail and average together.
        grad_reduce_dtype: the dtype that gradients are communicated and added up in; None: their own.
        device: where parameters, gradients and state are.
        grid: which ranks share, and which repeat; None: all share, and nobody repeats. Of no use at stage 0.
    """

    everyone: Comm
    stage: int
    grad_reduce_dtype: torch.dtype | None
    device: torch.device
    grid: Grid | None = None
    _chains: ChainQueue = field(default_factory=ChainQueue, compare=False)

    # -- who holds what ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This one among ``everyone``."""
        return self.everyone.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that gradients are averaged over."""
        return self.everyone.world_size

    @property
    def sharers(self) -> Comm:
        """The ranks that hold all parts among them, one each, this one included."""
        return self.everyone if self.grid is None else self.grid.within

    @property
    def rows(self) -> Rows | None:
        """The ranks of the grid, by replica and by shard."""
        return None if self.grid is None else self.grid.rows

    @property
    def shard_count(self) -> int:
        """Parts that state is split into."""
        return self.sharers.world_size if self.stage >= 1 else 1

    @property
    def shard_index(self) -> int:
        """The number of this rank's part among them."""
        return self.sharers.rank if self.stage >= 1 else 0

    @property
    def holders(self) -> tuple[int, int]:
        """How many ranks hold what this rank holds of the state, and which of them this is."""
        if self.shard_count == 1:
            return self.world_size, self.rank
        return (1, 0) if self.grid is None else (self.grid.across.world_size, self.grid.across.rank)

    @property
    def reduces(self) -> bool:
        """Whether gradients are averaged over several ranks."""
        return self.world_size > 1

    @property
    def grad_scale(self) -> float:
        """The factor of a rank's gradient that makes the sum over ranks an average."""
        return 1 / self.world_size

    @property
    def host_waits(self) -> bool:
        """Whether the host itself waits for what is communicated."""
        return self.everyone.host_waits(self.device)

    @property
    def speaks(self) -> bool:
        """Whether this rank's term counts in a sum over ranks. Of those that hold the same gradients one's does."""
        return self.holders[1] == 0

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` parameters are communicated. Alone, a rank widens nothing."""
        return self.grad_reduce_dtype or dtype if self.reduces else dtype

    @property
    def keeps_full_gradients(self) -> bool:
        """Whether gradients rest in full on this rank: at stages 0 and 1, and on one rank."""
        return self.stage <= 1 or not self.reduces

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` parameters rest. At stage 0 ``.grad`` shows what is applied."""
        return dtype if self.stage == 0 else self.reduce_dtype(dtype)

    def own_part(self, full: Tensor) -> Tensor:
        """This rank's shard of a flat tensor [shard_count * shard], a view."""
        shard_numel = full.numel() // self.shard_count
        return full.narrow(0, self.shard_index * shard_numel, shard_numel)

    # -- what is communicated ------------------------------------------------------------------------------------

    def connect_for_buckets(self, flats: Iterable[tuple[int, torch.dtype]], *, gathered: bool) -> None:
        """Collective. See ``Comm.connect_for``. ``flats``: elements and dtype of the buckets' parameters. ``gathered``:
        whether they are by ``all_gather``, too."""
        kind = "reduce_scatter" if self.shard_count > 1 else "all_reduce"
        for dtype, numel in largest_of(flats).items():
            reduced = self.reduce_dtype(dtype)
            self.sharers.connect_for(kind, numel, reduced, self.device)
            if self.grid is not None:
                self.grid.across.connect_for("all_reduce", numel // self.shard_count, reduced, self.device)
            if gathered and self.shard_count > 1:
                self.sharers.connect_for("all_gather", numel, dtype, self.device)

    def reduce(self, full: Tensor, out: Tensor, lend: Callable[[int], Tensor], *, accumulate: bool) -> Pending | Chain:
        """Sum ``full`` [shard_count * shard] over the ranks; this rank's shard of the sum goes to ``out`` [shard].

        Args:
            full: contribution of this rank; its contents are lost. ``out`` may be this rank's own part of it.
            lend: gives memory of ``full``'s dtype, that many elements, until the sum is there.
            accumulate: add to ``out`` instead of overwriting it; ``out`` is then no part of ``full``.
        """
        if self.grid is not None:
            return self._reduce_over_grid(self.grid, full, out, lend, accumulate=accumulate)
        if self.shard_count > 1:
            return self.everyone.reduce_scatter(full, out, lend, accumulate=accumulate)
        if full.data_ptr() == out.data_ptr():
            return self.everyone.all_reduce(full)
        store = out.add_ if accumulate else out.copy_
        return self.everyone.all_reduce(full, on_arrival=lambda: store(full))

    def _reduce_over_grid(
        self, grid: Grid, full: Tensor, out: Tensor, lend: Callable[[int], Tensor], *, accumulate: bool
    ) -> Pending | Chain:
        # What is added to goes through both legs in this rank's part of ``full``, and is added as it arrives.
        part, on_arrival = out, None
        if accumulate or out.dtype != full.dtype:
            part = grid.within.own_part(full)
            on_arrival = partial(out.add_ if accumulate else out.copy_, part)
        self._chains.go_on_with_arrived(0)
        first = grid.within.reduce_scatter(full, part, lend, accumulate=False)
        second = partial(grid.across.all_reduce, part, on_arrival, number=self.everyone.reserve())
        if self.host_waits:
            return self._chains.add(first, second)
        return issue_behind(first, second, self.device)

    def abandon(self) -> None:
        """Issue nothing any more: the ranks have parted."""
        self._chains.abandon()

    def all_gather(self, full: Tensor, kind: str = "all_gather", own: Tensor | None = None) -> Pending | None:
        """Fill ``full`` [shard_count * shard] with every shard, in place; its own is there. None: that is all.

        ``own``: this rank's shard, a view of ``full``, where the caller has it at hand.
        """
        return self.sharers.all_gather(full, kind, own) if self.shard_count > 1 else None

    def whole_of(self, shard: Tensor, kind: str) -> Tensor:
        """Collective. The whole of which each rank has given its ``shard``; this itself where it is all."""
        if self.shard_count == 1:
            return shard
        full = shard.new_empty(shard.numel() * self.shard_count)
        self.own_part(full).copy_(shard)
        if (gather := self.all_gather(full, kind)) is not None:
            gather.wait()
        return full

    def broadcast(self, tensor: Tensor, kind: str = "construction") -> None:
        """Copy rank 0's ``tensor`` to every rank, in place."""
        self.everyone.broadcast(tensor, kind)

    def broadcast_together(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's ``tensors`` to every rank, in place; small ones of a dtype travel in one flat tensor."""
        for run in runs(tensors) if self.world_size > 1 else ():
            if len(run) == 1:
                self.broadcast(run[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in run])
            self.broadcast(flat)
            for tensor, values in zip(run, flat.split([tensor.numel() for tensor in run]), strict=True):
                tensor.copy_(values.view(tensor.shape))

    def exchange(self, vector: Tensor, *, maximum: bool = False) -> None:
        """Sum (or maximise) a small vector over the ranks, in place, ordered before what follows."""
        self.everyone.exchange(vector, maximum=maximum)


def largest_of(flats: Iterable[tuple[int, torch.dtype]]) -> dict[torch.dtype, int]:
    """Find, by dtype, the most elements that one of these flat tensors has."""
    largest: dict[torch.dtype, int] = {}
    for numel, dtype in flats:
        largest[dtype] = max(numel, largest.get(dtype, 0))
    return largest


def runs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """``tensors`` of one dtype at a time, as many together as are no larger than ``_TOGETHER_BYTES``."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        run: list[Tensor] = []
        nbytes = 0
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            if run and nbytes + tensor.nbytes > _TOGETHER_BYTES:
                yield run
                run, nbytes = [], 0
            run.append(tensor)
            nbytes += tensor.nbytes
        yield run
