"""Finds whether the user keeps a gradient that ``.grad`` has shown: then its memory must not be used again."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.streams import references_in_cpp

_ALONE = max(map(sys.getrefcount, [object()]))  # the count of an object that one list alone refers to


class HandedOut:
    """The tensors over ``buffer`` that ``.grad`` shows, one a parameter.

    Make it before anybody else has seen one of them, and after all lasting views of ``buffer``.
    """

    def __init__(self, buffer: Tensor, handles: Sequence[Tensor], held: Sequence[Tensor] = ()) -> None:
        """``held``: tensors that the handles hold, one each, and that the user may take from there."""
        self._buffer, self._handles, self._held = buffer, handles, held
        self._uses = _storage_uses(buffer)

    def kept(self, parameters: Sequence[Tensor]) -> bool:
        """True if anything but its own parameter's ``.grad`` refers to one of the tensors, or to their memory."""
        references = [*map(sys.getrefcount, self._handles)]
        uses = [*map(references_in_cpp, self._handles)]  # all of them are one of the above
        if max(references, default=0) > _ALONE or max(uses, default=0) > 1:
            shown = [p.grad is handle for p, handle in zip(parameters, self._handles, strict=True)]
            for here, count, of_tensor in zip(shown, references, uses, strict=True):
                if count > _ALONE + here or of_tensor > 1 + here:
                    return True
        taken = max(map(sys.getrefcount, self._held), default=0) > _ALONE + 1
        return taken or _storage_uses(self._buffer) > self._uses


def _storage_uses(tensor: Tensor) -> int:
    """Count the tensors that share the storage, its own Python object included."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses
