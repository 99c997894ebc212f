"""Collectives over the shard group and, for HSDP, the replicate group; and the scale of an average.

By default one shard group spans all ranks. In a ``Grid`` (HSDP) the ranks of a row are the shard group, and reductions
go on across the rows. With state over all ranks the shard group is the whole grid, and every collective over it has two
legs, within a row and across the rows. What all ranks agree on, such as errors and orders, goes over ``world``: all
ranks of the job.

Where parameters are cut over tensor-parallel ranks, ``world`` is a matrix of ranks, and a column of it has the same
slices: its ranks average gradients, and shard. See ``TensorRanks``. Experts have a sharding of their own, with the same
``world``: see ``ExpertRanks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from .collectives import Comm
from .handle import Handle, SecondLegs, issue_behind
from .topology import ExpertRanks, Grid, Rows, TensorRanks, Topology, make_matrix

T = TypeVar("T")
_TOGETHER_BYTES = 25 * 2**20
"""The most bytes of a flat tensor into which others are copied for a broadcast; a larger tensor goes as it is."""


@dataclass(frozen=True)
class Sharding:
    """Splits state, gradients and parameters over ranks, and communicates what that needs.

    A stage is a comparison: 0 nothing, >= 1 optimizer state, >= 2 gradients, >= 3 parameters.

    Attributes:
        world: all ranks of the job: those that agree, and fail together.
        grad_reduce_dtype: the dtype that gradients are communicated and added up in; None: their own.
        grad_accumulation_dtype: the dtype that autograd and shards accumulate them in; None: their own, or as reduced.
        device: where parameters, gradients and state are.
        grid: which ranks shard, and which replicate; None: all shard, and none replicates. Of no use at stage 0.
        tensor_ranks: how parameters are cut over tensor-parallel ranks, or experts spread; None: they are not.
        grad_divisor: for experts, what the sum of gradients is divided by; None: these are other parameters.
        topology: the arguments that ``grid`` and ``tensor_ranks`` were made from.
        pipeline_stages: stages of the pipeline that the model is cut into; 1: it is in one piece.
        second_legs: under gloo, the second legs of reductions that wait for their first ones.
        gather_legs: the same of all-gathers, with state over all ranks. A step issues all of its own.
    """

    world: Comm
    stage: int
    grad_reduce_dtype: torch.dtype | None
    device: torch.device
    grid: Grid | None = None
    tensor_ranks: TensorRanks | None = None
    grad_divisor: int | None = None
    topology: Topology = Topology()
    grad_accumulation_dtype: torch.dtype | None = None
    pipeline_stages: int = 1
    second_legs: SecondLegs = field(default_factory=SecondLegs, compare=False)
    gather_legs: SecondLegs = field(default_factory=SecondLegs, compare=False)

    # -- who holds what ------------------------------------------------------------------------------------------

    @property
    def data_parallel(self) -> Comm:
        """The ranks that gradients are averaged over."""
        return self.world if self.tensor_ranks is None else self.tensor_ranks.data_parallel

    @property
    def world_size(self) -> int:
        """Number of ranks that gradients are averaged over."""
        return self.data_parallel.world_size

    @property
    def shard_group(self) -> Comm:
        """The ranks that hold all shards among them, one each, this rank included."""
        return self.data_parallel if self.grid is None or self.grid.over_all else self.grid.within

    @property
    def of_experts(self) -> bool:
        """Whether the parameters are experts. Other columns have other experts, so experts always count as cut."""
        return self.grad_divisor is not None

    @property
    def of_plain_slices(self) -> bool:
        """Whether slices are plain tensors, of which it is unknown how they make a whole."""
        return self.tensor_ranks is not None and self.tensor_ranks.plain

    @property
    def plain_slices(self) -> int:
        """Number of ranks that have plain slices of a cut parameter, one each; 1 where there are none."""
        return self.slice_count if self.of_plain_slices else 1

    @property
    def savers(self) -> Comm:
        """The ranks that save one state together. With plain slices each column saves one of its own."""
        return self.data_parallel if self.of_plain_slices else self.world

    @property
    def shard_count(self) -> int:
        """Number of shards that state is split into."""
        return self.shard_group.world_size if self.stage >= 1 else 1

    @property
    def shard_index(self) -> int:
        """The number of this rank's shard among these."""
        if self.stage == 0:
            return 0
        if self.grid is not None and self.grid.over_all:
            return self.grid.within.rank * self.grid.across.world_size + self.grid.across.rank
        return self.shard_group.rank

    @property
    def parts_of_shard(self) -> int:
        """At stage 3, the number of parts of a shard of parameters that ranks update, one each."""
        return self.grid.across.world_size if self.grid is not None and self.topology.over_all else 1

    @property
    def replicas(self) -> Comm | None:
        """The ranks that hold the same shard as this rank, this one included; None: no other does."""
        if self.shard_count == 1:
            return self.data_parallel if self.world_size > 1 else None
        return None if self.grid is None or self.grid.over_all else self.grid.across

    def holders(self, *, cut: bool) -> tuple[int, int]:
        """Count the ranks that hold the same state as this rank, and number this rank among them.

        ``cut``: whether its parameters are cut over the tensor-parallel ranks; else all of these have them.
        """
        count, number = (1, 0) if self.replicas is None else (self.replicas.world_size, self.replicas.rank)
        if self.tensor_ranks is not None and not cut and not self.of_experts:
            slices = self.tensor_ranks.slices
            count, number = count * slices.world_size, number * slices.world_size + slices.rank
        return count, number

    @property
    def reduces(self) -> bool:
        """Whether gradients are averaged over several ranks, or treated as if they were, in two cases.

        - Experts that only one rank has: their gradients leave, rest and are divided as those of other experts do.
        - Plain slices, also on one data-parallel rank: unlike a ``DTensor``, ``.grad`` of a plain tensor does not show
          whether it is a term that was added up. So such terms are added up as they leave."""
        return self.world_size > 1 or self.of_experts or self.of_plain_slices

    @property
    def agrees(self) -> bool:
        """Whether several ranks have to agree in a step, those with other slices or pipeline stages included."""
        return self.world.world_size > 1 or self.pipeline_stages > 1

    @property
    def grad_scale(self) -> float:
        """The factor of a rank's gradient that makes the sum over ranks an average."""
        return 1 / (self.grad_divisor or self.world_size)

    @property
    def host_waits(self) -> bool:
        """Whether the host itself waits for what is communicated."""
        return self.world.host_waits(self.device)

    def counted_in_norm(self, *, cut: bool) -> bool:
        """Whether this rank's gradients count in a norm: true on exactly one of the ranks that hold a replica."""
        return self.holders(cut=cut)[1] == 0

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` parameters are communicated. Alone, a rank widens nothing."""
        return self.grad_reduce_dtype or dtype if self.reduces else dtype

    @property
    def keeps_full_gradients(self) -> bool:
        """Whether gradients rest in full on this rank: at stages 0 and 1, and where there is one shard."""
        return self.stage <= 1 or self.shard_count == 1

    def local_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of ``.grad`` of ``dtype`` parameters, in which autograd accumulates this rank's gradients."""
        return self.grad_accumulation_dtype or dtype

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` parameters rest. At stage 0 ``.grad`` shows what is applied."""
        return self.local_dtype(dtype if self.stage == 0 else self.reduce_dtype(dtype))

    def own_part(self, full: Tensor) -> Tensor:
        """This rank's shard of a flat tensor [shard_count * shard], a view."""
        shard_numel = full.numel() // self.shard_count
        return full.narrow(0, self.shard_index * shard_numel, shard_numel)

    # -- what is communicated ------------------------------------------------------------------------------------

    def sum_over_slices(self, tensors: Sequence[Tensor]) -> None:
        """Sum each of ``tensors``, of one dtype, over the tensor-parallel ranks, in place, before what follows.

        They are added up in ``grad_reduce_dtype``, as over all other ranks.
        """
        if self.tensor_ranks is None or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        summed = flat.to(self.grad_reduce_dtype or flat.dtype)
        self.tensor_ranks.slices.exchange(summed, kind="tensor_parallel")
        for tensor, values in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    def reduce(
        self, full: Tensor, out: Tensor, lend: Callable[[int], Tensor], *, accumulate: bool, scale: float = 1.0
    ) -> Handle:
        """Sum ``full`` [shard_count * shard] over the ranks; this rank's shard of the sum goes to ``out`` [shard]. See
        ``Reduction``. ``lend``: lends so many elements of ``full``'s dtype until the sum is there. ``scale``: 1 if
        there is a grid, or nothing is scattered."""
        store = out.add_ if accumulate else out.copy_
        if self.shard_count == 1:
            in_place = full.data_ptr() == out.data_ptr()
            return self.data_parallel.all_reduce(full, None if in_place else partial(store, full))
        if self.grid is None:
            return self.data_parallel.reduce_scatter(full, out, lend, accumulate=accumulate)
        # Two legs: within this rank's row, then across the rows.
        within, across, part = self.grid.within, self.grid.across, out
        if self.grid.over_all or accumulate or out.dtype != full.dtype:
            # Both run in this row's part of ``full``, and the sum is added to ``out``, or cast, as it arrives.
            part = within.own_part(full)
        self.gather_legs.issue()  # over the same group as the first leg; none is left but after an error in a step
        self.second_legs.issue_arrived(0)
        first = within.reduce_scatter(full, part, lend, accumulate=False)
        # Numbered now: when the second leg is issued differs from rank to rank.
        number = self.world.log.reserve()
        if self.grid.over_all:
            # Another rank's part is free after the first leg, and has room for what the second one receives.
            spare, kind = partial(full.chunk(within.world_size)[within.rank - 1].narrow, 0, 0), "replica_reduce_scatter"
            second = partial(across.reduce_scatter, part, out, spare, accumulate=accumulate, kind=kind, number=number)
        else:
            second = partial(across.all_reduce, part, None if part is out else partial(store, part), number=number)
        if self.host_waits:
            return self.second_legs.add(first, second)
        return issue_behind(first, second, self.device)

    def all_gather(self, full: Tensor, kind: str = "all_gather", own: Tensor | None = None) -> Handle | None:
        """Fill ``full`` [shard_count * shard] with every shard. None: there are no others.

        ``own``: this rank's shard, in ``full`` or in other memory; None: it is in its place in ``full``.
        """
        if self.shard_count == 1:
            return None
        if self.grid is None or not self.grid.over_all:
            return self.shard_group.all_gather(full, kind, own)
        # Two legs: across the rows, then within this rank's row.
        self.gather_legs.issue_arrived(0)
        first = self.gather_across(self.grid.within.own_part(full), kind, own)
        second = partial(self.grid.within.all_gather, full, kind, number=self.world.log.reserve())
        if self.host_waits:
            return self.gather_legs.add(first, second)
        return issue_behind(first, second, self.device)

    def gather_across(self, part: Tensor, kind: str = "all_gather", own: Tensor | None = None) -> Handle:
        """With state over all ranks: fill ``part``, what this row has of the whole. ``own``: see ``all_gather``."""
        assert self.grid is not None
        self.second_legs.issue()  # over the same group, and which of them a rank has issued by now differs
        return self.grid.across.all_gather(part, f"replica_{kind}", own)

    @property
    def slice_count(self) -> int:
        """Number of tensor-parallel ranks, each with another slice of a cut parameter."""
        return 1 if self.tensor_ranks is None else self.tensor_ranks.slices.world_size

    @property
    def slice_index(self) -> int:
        """The number of this rank's slice among these."""
        return 0 if self.tensor_ranks is None else self.tensor_ranks.slices.rank

    def alike(self, *, cut: bool) -> Comm:
        """The ranks whose values of a parameter are the same. ``cut``: whether it is cut over tensor-parallel ranks."""
        return self.data_parallel if cut or self.of_experts else self.world

    def equals(self, *, cut: bool, state: bool = False) -> tuple[int, int, int]:
        """Count the ranks whose memory of a parameter, or of its ``state``, has the same values as this rank's; number
        this rank among them; and number this group of ranks among those with other shards and slices."""
        place, alike = self.shard_index, self.alike(cut=cut)
        count, number = self.holders(cut=cut)
        if not state and self.stage < 3:  # parameters are whole
            count, number, place = alike.world_size, alike.rank, 0
        of_slice = cut or self.of_experts
        return count, number, place * self.slice_count + self.slice_index if of_slice else place


def make_sharding(
    world: Comm,
    stage: int,
    device: torch.device,
    topology: Topology,
    *,
    grad_reduce_dtype: torch.dtype | None = None,
    grad_accumulation_dtype: torch.dtype | None = None,
    pipeline_stages: int = 1,
) -> Sharding:
    """Collective. Make the sharding of ``world``, with communicators that are connected for ``device``."""
    tensor_ranks, data_parallel, grid = None, world, None
    if topology.columns is not None:
        tensor_ranks = _make_tensor_ranks(world, topology.columns, device, plain=topology.plain)
        data_parallel = tensor_ranks.data_parallel
    if topology.rows is not None:
        matrix = make_matrix(data_parallel, topology.rows, device, "within a replica", "across replicas")
        grid = Grid(*matrix, over_all=topology.over_all)
    return Sharding(
        world,
        stage,
        grad_reduce_dtype,
        device,
        grid,
        tensor_ranks,
        topology=topology,
        grad_accumulation_dtype=grad_accumulation_dtype,
        pipeline_stages=pipeline_stages,
    )


def _make_tensor_ranks(world: Comm, columns: Rows, device: torch.device, *, plain: bool) -> TensorRanks:
    matrix = make_matrix(world, columns, device, "data-parallel ranks", "tensor-parallel ranks")
    return TensorRanks(*matrix, plain)


def make_expert_shardings(main: Sharding, given: Mapping[T, ExpertRanks]) -> dict[T, Sharding]:
    """Collective. Make the shardings of these experts, by their key. ``main``: of all other parameters."""
    made: dict[Rows, Sharding] = {}
    for columns in dict.fromkeys(of_group.columns for of_group in given.values()):
        ranks = _make_tensor_ranks(main.world, columns, main.device, plain=False)
        made[columns] = replace(main, grid=None, tensor_ranks=ranks)
    return {key: replace(made[of.columns], grad_divisor=of.grad_divisor) for key, of in given.items()}


def connect_for_buckets(
    sharding: Sharding, flats: Iterable[tuple[int, torch.dtype]], memory: Tensor, *, gathered: bool
) -> None:
    """Collective. Connect the ranks for the collectives of buckets, see ``Comm.connect_for``.

    Args:
        flats: elements and dtype of each bucket.
        memory: a buffer of reductions that nothing uses.
        gathered: whether parameters are all-gathered, too.
    """
    grid, device = sharding.grid, sharding.device
    first = sharding.shard_group if grid is None else grid.within
    kind = "reduce_scatter" if sharding.shard_count > 1 else "all_reduce"
    for numel, dtype in of_each_size(flats):
        reduced = sharding.reduce_dtype(dtype)
        first.connect_for(kind, numel, reduced, device, memory)
        if gathered and sharding.shard_count > 1:
            first.connect_for("all_gather", numel, dtype, device, memory)
        if grid is not None:
            part = numel // grid.within.world_size
            grid.across.connect_for("reduce_scatter" if grid.over_all else "all_reduce", part, reduced, device, memory)
            if grid.over_all:
                grid.across.connect_for("all_gather", part, dtype, device, memory)


def ranks_of_shards(sharding: Sharding) -> list[int]:
    """List, by the number of the shard, the rank of ``shard_group`` that has it."""
    grid, rows = sharding.grid, sharding.topology.rows
    if grid is None or not grid.over_all or rows is None:
        return list(range(sharding.shard_group.world_size))
    # A row splits the whole, and a column each of these parts: so the parts of a column follow each other.
    place = {rank: number for number, rank in enumerate(sharding.shard_group.ranks)}
    return [place[rank] for column in zip(*rows, strict=True) for rank in column]


def whole_of(sharding: Sharding, shard: Tensor, kind: str) -> Tensor:
    """Collective. Gather the whole of which each rank gives its ``shard``; ``shard`` itself where it is all."""
    if sharding.shard_count == 1:
        return shard
    full = shard.new_empty(shard.numel() * sharding.shard_count)
    sharding.own_part(full).copy_(shard)
    if (gather := sharding.all_gather(as_sent(full), kind)) is not None:
        gather.wait()
    return full


def gather_slices(sharding: Sharding, own: Tensor, kind: str) -> Tensor:
    """Collective. Gather ``own`` [numel] of every tensor-parallel rank: [slices, numel]."""
    every = own.new_empty(sharding.slice_count, own.numel())
    every[sharding.slice_index].copy_(own)
    if sharding.tensor_ranks is not None:
        sharding.tensor_ranks.slices.all_gather(as_sent(every.view(-1)), kind).wait()
    return every


def broadcast_together(comm: Comm, tensors: Sequence[Tensor]) -> None:
    """Collective. Broadcast rank 0's values of several tensors. Small ones of a dtype travel in one flat tensor."""
    for run in runs(tensors) if comm.world_size > 1 else ():
        if len(run) == 1:
            comm.broadcast(run[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in run])
        comm.broadcast(flat)
        for tensor, values in zip(run, flat.split([tensor.numel() for tensor in run]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def of_each_size(flats: Iterable[tuple[int, torch.dtype]]) -> list[tuple[int, torch.dtype]]:
    """Find the largest of these flat tensors, by elements and dtype, of each dtype and size: a factor of 4 of bytes."""
    largest: dict[tuple[int, torch.dtype], int] = {}
    for numel, dtype in flats:
        size = (numel * dtype.itemsize).bit_length() // 2, dtype
        largest[size] = max(numel, largest.get(size, 0))
    return [(numel, dtype) for (_, dtype), numel in largest.items()]


def runs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split ``tensors`` into runs of one dtype: as many together as are no larger than ``_TOGETHER_BYTES``."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        yield from split_runs(of_dtype, attrgetter("nbytes"), _TOGETHER_BYTES)


def split_runs(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Split ``items``, in their order, into runs of size ``most`` at most, or of one item."""
    run: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if run and total + size > most:
            yield run
            run, total = [], 0
        run.append(item)
        total += size
    if run:
        yield run


def as_sent(tensor: Tensor) -> Tensor:
    """View ``tensor``, which is sent as it is, in a dtype that every back-end sends: none sends all integer dtypes."""
    return tensor if tensor.is_floating_point() else tensor.view(torch.uint8)
