"""The memory behind tensors: given, taken away, and seen as a storage of its own. Views of such a tensor stay."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .streams import keep_for_current_stream

references_in_cpp: Callable[[Tensor], int] = operator.methodcaller("_use_count")
"""Count the references to a tensor in C++; all its references in Python share one of them."""


def allocate(tensor: Tensor, nbytes: int | None = None) -> None:
    """Give memory back to a tensor, and to its views, after ``deallocate``. Contents: undefined. ``nbytes``: of its
    beginning, where no more will be used; None: all."""
    storage = tensor.untyped_storage()
    needed = tensor.nbytes if nbytes is None else nbytes
    if storage.nbytes() < needed:
        deallocate(tensor)  # else what is there would be copied
        storage.resize_(needed)


def deallocate(tensor: Tensor) -> None:
    """Free the memory of a tensor that has a storage of its own. Its views stay. Memory that NumPy has seen, by
    ``tensor.numpy()``, is not freed: an array may still show it."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        keep_for_current_stream(tensor)
        storage.resize_(0)


def bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] uint8, all of the storage that a tensor views."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def is_there(tensor: Tensor) -> bool:
    """Whether there is memory behind the tensor."""
    return tensor.untyped_storage().nbytes() > 0


def as_own_storage(view: Tensor) -> Tensor:
    """View the same memory as a storage of its own.

    Of tensors that share a storage safetensors keeps one and drops the others, with a warning (seen: a checkpoint
    without most parameters), and torch.save of a single one writes them all.
    """
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())


def own_storages(full: Tensor, views: Sequence[Tensor]) -> Iterator[Tensor]:
    """Do the same for many ``views`` of ``full``, faster."""
    storage, itemsize = full.untyped_storage(), full.itemsize
    for view in views:
        start = view.storage_offset() * itemsize
        part = storage[start : start + view.numel() * itemsize]
        yield full.new_empty(0).set_(part, 0, view.shape, view.stride())
