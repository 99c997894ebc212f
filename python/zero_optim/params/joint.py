"""Joints: how the slices of a parameter make a whole, for a rule that needs whole parameters.

Slices of a ``DTensor`` follow each other along the dimension that is cut. For plain slices Megatron's attributes tell:

================  ========================================================================================
partition_dim     the dimension that is cut
partition_stride  of how many equal blocks of the whole each rank has its share; 1: the slices follow each other
partition_sizes   the lengths of these shares in a slice, where they are not equal: each block in turn
================  ========================================================================================

A weight of gates and ups, cut over 2 ranks, with ``partition_stride = 2``::

    whole       g0 g1 g2 g3 | u0 u1 u2 u3
    rank 0      g0 g1 | u0 u1
    rank 1      g2 g3 | u2 u3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .marks import is_slice
from .tensor_slice import is_distributed, slice_of

DIM, STRIDE, SIZES = "partition_dim", "partition_stride", "partition_sizes"


@dataclass(frozen=True)
class Joint:
    """The slices of one parameter, and where they belong.

    Attributes:
        shape: of the whole.
        dim: along which it is cut.
        blocks: for each block of the whole along ``dim``, in order, the length of each rank's share.
    """

    shape: tuple[int, ...]
    dim: int
    blocks: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of slices."""
        return len(self.blocks[0])

    def shares(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """List a rank's shares: the start in the whole, the start in the slice, and the length, along ``dim``."""
        in_whole = in_slice = 0
        for lengths in self.blocks:
            yield in_whole + sum(lengths[:rank]), in_slice, lengths[rank]
            in_whole += sum(lengths)
            in_slice += lengths[rank]


def joint_of(parameter: Any, ranks: int) -> Joint | None:
    """Read how the slices of ``parameter`` make a whole; None: this rank has the whole.

    ``ranks``: number of ranks with plain slices, one each. ``refuse_partition`` has accepted a plain slice before.
    """
    own = slice_of(parameter)
    if own is not None:
        cut = own.cut if own.ranks > 1 else None
        return None if cut is None else Joint(own.shape, cut.dim, (cut.sizes,))
    if ranks == 1 or not is_plain_slice(parameter):
        return None
    blocks = tuple((length,) * ranks for length in _share_lengths(parameter))
    return Joint(whole_shape(parameter, ranks), getattr(parameter, DIM), blocks)


def is_plain_slice(parameter: Tensor) -> bool:
    """Whether a parameter is a slice by its mark, and no ``DTensor``."""
    return is_slice(parameter) and not is_distributed(parameter)


def whole_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    """The shape of the whole. ``ranks``: see ``joint_of``."""
    shape = tuple(parameter.shape)
    if ranks == 1 or not is_plain_slice(parameter):
        return shape
    dim = getattr(parameter, DIM)
    return (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :])


def refuse_partition(parameter: Tensor) -> str | None:
    """Say why the attributes of a plain slice do not tell how slices make a whole, and what to do. None: they do."""
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


def says_blocks(parameter: Tensor) -> bool:
    """Whether attributes of a plain slice say in how many blocks it has shares."""
    return hasattr(parameter, STRIDE) or hasattr(parameter, SIZES)


def partition(parameter: Tensor) -> str:
    """List a plain slice's attributes, for messages; empty for another parameter."""
    if not is_plain_slice(parameter):
        return ""
    said = [(name, getattr(parameter, name)) for name in (DIM, STRIDE, SIZES) if hasattr(parameter, name)]
    return "".join(f", {name} = {value}" for name, value in said)


def _share_lengths(parameter: Tensor) -> tuple[int, ...]:
    """The length of each share of a plain slice along the dimension that is cut."""
    if (sizes := getattr(parameter, SIZES, None)) is not None:
        return tuple(sizes)
    stride = getattr(parameter, STRIDE, 1)
    return (parameter.shape[getattr(parameter, DIM)] // stride,) * stride
