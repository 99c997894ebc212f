"""Tensor parallelism: parameters of which each rank has a slice along one dimension, or all ranks have the whole.

Such a parameter is a ``DTensor``. The optimizer works on the local tensor within it; the parameter, gradient and state
that a user sees have the shape of the whole::

    weight [6, 4], cut along dimension 0 over 2 tensor-parallel ranks

    rank 0   rows 0 to 2   ──┐
    rank 1   rows 3 to 5   ──┴── flat ranges count the slices one after another: rank 1's begins at element 12

Or it is a plain tensor with Megatron's attributes, which are read in this file alone. It is a parameter of its own
shape, and has no ``TensorSlice``; a rule that needs whole parameters joins slices as ``Joint`` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ParameterError
from .storage_order import Cut, StorageOrder, flat_of, slice_counts, view_of


@dataclass(frozen=True)
class TensorSlice:
    """The slice of a parameter that one tensor-parallel rank has.

    Attributes:
        shape: of the whole parameter.
        cut: None: every rank has all of it.
        ranks, rank: how many tensor-parallel ranks there are, and which of them this is.
    """

    shape: tuple[int, ...]
    cut: Cut | None
    ranks: int
    rank: int

    @property
    def dim(self) -> int:
        """The dimension of the cut; 0 without one."""
        return 0 if self.cut is None else self.cut.dim

    @property
    def offset(self) -> int:
        """The row at which the slice begins, along ``dim``."""
        return 0 if self.cut is None else self.cut.start(self.rank)

    @property
    def end(self) -> int:
        """The row behind its last one, along ``dim``."""
        return self.offset + self.local_shape[self.dim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return self.shape if self.cut is None else self.cut.shape(self.shape, self.rank)

    @property
    def start(self) -> int:
        """The number of its first element, counting the slices one after another."""
        return sum(slice_counts(self.shape, self.cut)[: self.rank]) if self.cut is not None else 0

    @property
    def arranged(self) -> Cut | None:
        """The cut, where slices one after another have their elements in another order than the whole; else None."""
        return self.cut if self.cut is not None and self.cut.dim > 0 else None

    def of(self, whole: Tensor) -> Tensor:
        """View this slice of ``whole``."""
        return whole if self.cut is None else whole.narrow(self.cut.dim, self.offset, self.cut.sizes[self.rank])

    def on(self, rank: int) -> TensorSlice:
        """The slice that another tensor-parallel rank has."""
        return replace(self, rank=rank)


def is_distributed(tensor: object) -> bool:
    """True for a ``DTensor``. Does not import its module: where there is one, it was imported already."""
    return hasattr(tensor, "_local_tensor")


def local_of(tensor: Any) -> Tensor:
    """The tensor in this rank's memory: what is within a ``DTensor``, else itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def mesh_of(parameters: Iterable[Tensor]) -> dist.DeviceMesh | None:
    """Find the mesh of the first ``DTensor`` over a mesh of one dimension: ``slice_of`` refuses other meshes."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in parameters)
    return next((mesh for mesh in meshes if mesh is not None and mesh.ndim == 1), None)


def slice_of(parameter: Any, label: str = "a parameter") -> TensorSlice | None:
    """Read the slice that this rank has; None for a plain parameter. ``label``: for messages.

    Raises ParameterError for a ``DTensor`` that is placed in another way than tensor parallelism places it.
    """
    if not is_distributed(parameter):
        return None
    mesh, shape = parameter.device_mesh, tuple(parameter.shape)
    if mesh.ndim != 1 or mesh.get_coordinate() is None:
        raise ParameterError(
            f"{label} is a DTensor over a mesh of the dimensions {mesh.mesh_dim_names}: give parallelize_module the "
            "one dimension of tensor parallelism, as mesh['tp'], and leave sharding over data-parallel ranks, as "
            "fully_shard does it, to this optimizer"
        )
    (placement,) = parameter.placements
    ranks, rank, cut = mesh.size(), mesh.get_local_rank(), None
    if type(placement).__name__ == "Shard":
        dim = placement.dim % len(shape)
        rows = -(-shape[dim] // ranks)
        cut = Cut(dim, tuple(max(0, min(rows, shape[dim] - rows * other)) for other in range(ranks)))
    elif not placement.is_replicate():
        raise ParameterError(
            f"{label} is a DTensor placed as {placement}: the optimizer takes Shard(dim) and Replicate()"
        )
    found = TensorSlice(shape, cut, ranks, rank)
    if tuple(local_of(parameter).shape) != found.local_shape:
        raise ParameterError(
            f"{label} is a DTensor of shape {shape}, placed as {placement} over {ranks} ranks, and number {rank} of "
            f"them has {tuple(local_of(parameter).shape)} of it, not {found.local_shape}: make it by distribute_tensor"
        )
    return found


def placed(parameter: Any) -> str:
    """Describe the placement of a ``DTensor``, for messages; nothing for a plain tensor."""
    return f", placed as {parameter.placements}" if is_distributed(parameter) else ""


def is_cut(parameter: Any) -> bool:
    """Whether the tensor-parallel ranks have a slice each. Else each has the whole, as of a plain parameter without a
    mark."""
    own = slice_of(parameter)
    return is_slice(parameter) if own is None else own.cut is not None


def whole_of(tensor: Any) -> Tensor:
    """Gather a whole ``DTensor``, by torch's own means: collective then. A plain tensor is whole."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def room_of(parameter: Tensor) -> int:
    """Count the elements of the largest slice."""
    # Every tensor-parallel rank gives a parameter that much room: so all have the same buckets, and launch their
    # collectives in the same order.
    own = slice_of(parameter)
    return parameter.numel() if own is None else prod(own.on(0).local_shape)  # torch makes the first the largest


@torch.no_grad()
def shown_as(parameter: Any, local: Tensor, *, term: bool = False) -> Tensor:
    """Wrap ``local`` for the user: in a ``DTensor`` placed as ``parameter`` is; as it is for a plain parameter.

    ``term``: it is a term of a sum over the tensor-parallel ranks, and is placed as ``Partial()``.
    """
    if not is_distributed(parameter):
        return local
    placements = parameter.placements
    if term:
        from torch.distributed.tensor import Partial

        placements = (Partial(),)
    shown: Any = type(parameter.data).from_local(
        # torch cannot deepcopy a DTensor around a tensor with an offset in its storage.
        local.as_strided(local.shape, local.stride(), 0),
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    shown._local_tensor = local
    return shown


@torch.no_grad()
def local_gradient(parameter: Any, grad: Any) -> tuple[Tensor, bool]:
    """Take this rank's slice of a gradient, and whether it is only a term of the sum over tensor-parallel ranks."""
    if not is_distributed(grad):
        return grad, False
    placement, wanted = grad.placements[0], parameter.placements[0]
    if placement.is_partial() and getattr(placement, "reduce_op", "sum") == "sum" and wanted.is_replicate():
        return grad._local_tensor, True  # sequence parallelism, of a parameter that all of these ranks have
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return grad._local_tensor, False


# -- slice by slice ------------------------------------------------------------------------------------------------

Read = Callable[[Tensor, int], None]
"""Fills a flat tensor with the elements from a number on."""


@dataclass(frozen=True)
class Arrangement:
    """``order``: of each slice, see ``storage_order``. ``cut``: None: the tensor is one slice."""

    order: StorageOrder = None
    cut: Cut | None = None

    def slices(self, shape: Sequence[int]) -> list[TensorSlice]:
        """List the slices of a tensor of ``shape``."""
        ranks = 1 if self.cut is None else len(self.cut.sizes)
        return [TensorSlice(tuple(shape), self.cut, ranks, rank) for rank in range(ranks)]


WHOLE = Arrangement()
"""The arrangement of a contiguous whole, as in a file of one whole tensor."""


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
    for wanted in here.slices(shape):
        first_number, row = wanted.start, prod(wanted.local_shape[1:])
        low, high = max(start, first_number), min(start + target.numel(), first_number + prod(wanted.local_shape))
        if low >= high:
            continue
        first, end = (low - first_number) // row, -(-(high - first_number) // row)
        flat = flat_of(_read_rows(wanted, first, end, there, target, read), here.order)
        target[low - start : high - start].copy_(flat.narrow(0, low - first_number - first * row, high - low))


def _read_rows(wanted: TensorSlice, first: int, end: int, there: Arrangement, like: Tensor, read: Read) -> Tensor:
    """Read rows ``first`` to ``end`` of dimension 0 of a slice: in every order, whole rows are a flat range."""
    slices = [of for of in there.slices(wanted.shape) if prod(of.local_shape[1:])]
    same_cut = slices[0].dim == wanted.dim
    if same_cut:
        slices = [of for of in slices if of.end > wanted.offset and of.offset < wanted.end]
    parts = []
    for of in slices:
        row = prod(of.local_shape[1:])
        flat = like.new_empty((end - first) * row)
        read(flat, of.start + first * row)
        parts.append(view_of(flat, (end - first, *of.local_shape[1:]), there.order))
    rows = torch.cat(parts, slices[0].dim) if len(parts) > 1 else parts[0]
    if not wanted.dim:
        return rows
    skipped = slices[0].offset if same_cut else 0
    return rows.narrow(wanted.dim, wanted.offset - skipped, wanted.local_shape[wanted.dim])


# -- plain slices: Megatron's attributes --------------------------------------------------------------------------

SLICE = "tensor_model_parallel"  # True: each tensor-parallel rank has another slice; else all have the same copy
TERM = "sequence_parallel"  # a copy, of whose gradient each of them has a term of the sum
_SHARED = "shared"  # a second copy of a parameter that another pipeline stage has, and counts
AVERAGED = "average_gradients_across_tp_domain"  # a copy whose gradient is to be averaged: refused
DIM = "partition_dim"  # the dimension that is cut
STRIDE = "partition_stride"  # how many equal blocks of the whole each rank has a part of; 1: slices follow each other
SIZES = "partition_sizes"  # the lengths of these parts in a slice, where blocks are not equal


def is_slice(parameter: Tensor) -> bool:
    """Whether it is marked as one of several slices."""
    return bool(getattr(parameter, SLICE, False))


def is_term(parameter: Tensor) -> bool:
    """Whether its gradient is marked as a term of a sum over the tensor-parallel ranks."""
    return bool(getattr(parameter, TERM, False))


def is_shared(parameter: Tensor) -> bool:
    """Whether it is marked as a copy that another stage of the pipeline counts."""
    return bool(getattr(parameter, _SHARED, False))


def is_plain_slice(parameter: Tensor) -> bool:
    """Whether a parameter is a slice by its mark, and no ``DTensor``."""
    return is_slice(parameter) and not is_distributed(parameter)


def marked(parameter: Tensor) -> str:
    """List the marks of a parameter, for messages; empty where it has none."""
    found = [name for name in (SLICE, TERM, _SHARED, AVERAGED) if getattr(parameter, name, False)]
    return "".join(f", {name} = True" for name in found)


def partition(parameter: Tensor) -> str:
    """List how a plain slice is cut, for messages; empty for another parameter."""
    found = [name for name in (DIM, STRIDE, SIZES) if is_plain_slice(parameter) and hasattr(parameter, name)]
    return "".join(f", {name} = {getattr(parameter, name)}" for name in found)


def refuse_partition(parameter: Tensor) -> str | None:
    """Return why the attributes of a plain slice don't define the whole, and what to do. None: they do."""
    shape, dim = tuple(parameter.shape), getattr(parameter, DIM, None)
    sizes, stride = getattr(parameter, SIZES, None), getattr(parameter, STRIDE, 1)
    if type(dim) is not int or not 0 <= dim < len(shape):
        return (
            f"is a slice of shape {shape} with {DIM} = {dim!r}: set {DIM} to the dimension that is cut over the "
            f"tensor-parallel ranks, and {STRIDE} to 1 where the slices follow each other"
        )
    if sizes is not None:
        listed = isinstance(sizes, tuple | list) and all(type(size) is int and size >= 0 for size in sizes)
        fits = listed and sum(sizes) == shape[dim]
    else:
        fits = type(stride) is int and stride > 0 and shape[dim] % stride == 0
    if fits:
        return None
    given = f"{STRIDE} = {stride!r}" if sizes is None else f"{SIZES} = {sizes!r}"
    return (
        f"is a slice of shape {shape}, cut along dimension {dim}, with {given}: give a {STRIDE} that divides "
        f"{shape[dim]}, or {SIZES} that add up to it"
    )


@dataclass(frozen=True)
class Joint:
    """How the slices of one parameter make a whole. A weight of gates and ups over 2 ranks, in 2 blocks::

        whole       g0 g1 g2 g3 | u0 u1 u2 u3
        rank 0      g0 g1 | u0 u1
        rank 1      g2 g3 | u2 u3

    Attributes:
        shape: of the whole.
        dim: along which it is cut.
        blocks: for each block of the whole along ``dim``, in order, the length of each rank's part.
    """

    shape: tuple[int, ...]
    dim: int
    blocks: tuple[tuple[int, ...], ...]

    def slices_of(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """List a rank's parts: the start in the whole, the start in the slice, and the length, along ``dim``."""
        in_whole = in_slice = 0
        for lengths in self.blocks:
            yield in_whole + sum(lengths[:rank]), in_slice, lengths[rank]
            in_whole += sum(lengths)
            in_slice += lengths[rank]


def joint_of(parameter: Any, ranks: int) -> Joint | None:
    """Read how the slices of ``parameter`` make a whole; None: this rank has the whole.

    ``ranks``: number of ranks with plain slices, one each. ``refuse_partition`` has accepted a plain slice before.
    """
    if (own := slice_of(parameter)) is not None:
        cut = own.cut if own.ranks > 1 else None
        return None if cut is None else Joint(own.shape, cut.dim, (cut.sizes,))
    if ranks == 1 or not is_plain_slice(parameter):
        return None
    dim, stride = getattr(parameter, DIM), getattr(parameter, STRIDE, 1)
    if (sizes := getattr(parameter, SIZES, None)) is None:
        sizes = (parameter.shape[dim] // stride,) * stride
    return Joint(whole_shape(parameter, ranks), dim, tuple((length,) * ranks for length in sizes))


def whole_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    """The shape of the whole. ``ranks``: see ``joint_of``."""
    shape = tuple(parameter.shape)
    if ranks == 1 or not is_plain_slice(parameter):
        return shape
    dim = getattr(parameter, DIM)
    return (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :])
