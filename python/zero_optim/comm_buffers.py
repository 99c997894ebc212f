"""The two buffers that gradients are packed into and received in, lent to one bucket after another."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from .comm import Pending
from .storage import allocate, deallocate


class Borrower(Protocol):
    """A bucket, as far as it borrows."""

    pending: Pending | None

    def wait(self) -> None: ...


class CommBuffers:
    """Two buffers, at most as large as the largest bucket, lent in turn. Taking one waits for who had it last.

    With ``ZERO_OPTIM_DEBUG=poison`` what was communicated is overwritten with NaN once it has been used: whoever reads
    it later is found out.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storages = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._users: list[Borrower | None] = [None, None]
        self.allocated = True
        self.poison = "poison" in debug_options()

    def take(self, bucket: Borrower, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer [numel], its contents undefined."""
        self.storages.reverse()
        self._users.reverse()
        if self._users[0] is not None:
            self._users[0].wait()
        self._users[0] = bucket
        nbytes = numel * dtype.itemsize
        allocate(self.storages[0], nbytes)
        self.allocated = True
        return self.storages[0][:nbytes].view(dtype)

    def nbytes(self) -> int:
        return sum(storage.untyped_storage().nbytes() for storage in self.storages)

    def deallocate(self) -> None:
        """Leave the memory to others until a buffer is taken again. What was lent has to have arrived."""
        for user in self._users:
            if user is not None:
                user.wait()
        self._users = [None, None]
        self.allocated = False
        for storage in self.storages:
            deallocate(storage)

    @property
    def free(self) -> bool:
        """Whether taking one would not wait."""
        return all(user is None or user.pending is None or user.pending.arrived for user in self._users)

    def release(self, bucket: Borrower) -> None:
        """The bucket's reduction has arrived: nothing in the buffers lent to it is needed any more."""
        for storage, user in zip(self.storages, self._users, strict=True):
            if self.poison and user is bucket:
                storage[: storage.untyped_storage().nbytes()].fill_(0xFF)  # NaN in every float dtype


def debug_options() -> set[str]:
    """What ``ZERO_OPTIM_DEBUG`` asks for: a comma-separated list. Raises ValueError for an unknown word."""
    options = {word.strip() for word in os.environ.get("ZERO_OPTIM_DEBUG", "").split(",")} - {""}
    if options - {"poison"}:
        raise ValueError(f"ZERO_OPTIM_DEBUG holds {sorted(options - {'poison'})}, but knows 'poison' alone")
    return options
