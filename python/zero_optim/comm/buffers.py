"""The memory that gradients are packed into and received in, lent to one reduction after another."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from .storage import allocate, deallocate
from .streams import keep_for_current_stream

PATIENCE_SECONDS = 2.0
"""The longest wait of a rank for a buffer, before it makes another. Ranks of a healthy job differ by far less."""


COUNT = 2
"""Number of buffers: one is packed into, or received in, while the contents of the other are on their way."""


class Borrower(Protocol):
    """A bucket, as far as it borrows."""

    def arrives_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``, and tell whether all of the bucket's reductions have arrived."""

    def wait(self) -> None: ...


class CommBuffers:
    """Two buffers, at most as large as the largest bucket, lent in turn. Taking one waits for its last reduction.

    Two cases in which a rank must not wait get memory of their own, which goes when the reduction has arrived:

    - *Several optimizers share ranks.* In one backward, rank 0 may use the parameters of the first alone and rank 1
      those of the second. Rank 0 would wait for rank 1 in the first, and rank 1 for rank 0 in the second, for ever.
      All gradients may be in flight at once there: their memory, in the dtype of the reduction, is the price.
    - *Under gloo, a rank has waited for* ``PATIENCE_SECONDS``. Another rank may have raised. It takes part again only
      at the next call of ``zero_grad``, which this rank has to reach, too.

    With ``ZERO_OPTIM_DEBUG=poison`` a buffer is overwritten with NaN once it was used, which shows later reads.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storages = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(COUNT)]
        self._borrowers: list[Borrower | None] = [None] * COUNT
        self._given_up: Borrower | None = None  # who was waited for in vain
        self._extra = 0  # bytes lent beside the two
        self._peak = 0  # the most bytes that there were as one was taken
        self.allocated = True
        self.poison = "poison" in debug_options()

    def take(self, bucket: Borrower, numel: int, dtype: torch.dtype, *, may_wait: bool = True) -> Tensor:
        """Lend a buffer [numel], its contents undefined, until ``give_back``."""
        nbytes = numel * dtype.itemsize
        # See the class: a wait here could be for ever. So this reduction gets memory of its own.
        if not may_wait or not self._arrives(self._borrowers[1]):
            self._extra += nbytes
            self._peak = self.peak_nbytes()
            return torch.empty(numel, dtype=dtype, device=self.storages[0].device)
        self.storages.reverse()
        self._borrowers.reverse()
        if self._borrowers[0] is not None:
            self._borrowers[0].wait()
        self._borrowers[0] = bucket
        allocate(self.storages[0], nbytes)
        self.allocated = True
        self._peak = self.peak_nbytes()
        return self.storages[0][:nbytes].view(dtype)

    def deallocate_once_arrived(self) -> None:
        """Call ``deallocate`` if all that was lent arrives within ``PATIENCE_SECONDS``."""
        if self.allocated and all(map(self._arrives, self._borrowers)):
            self.deallocate()

    def _arrives(self, user: Borrower | None) -> bool:
        """Whether what was lent to ``user`` has arrived, waiting up to ``PATIENCE_SECONDS``.

        Patience runs out once. While the borrower that used it up has still not arrived, no other is waited for.
        """
        if user is None or user.arrives_within(0):
            return True
        # The same rank is still missing: to wait once more, for another bucket, would be in vain, too.
        if self._given_up is not None and not self._given_up.arrives_within(0):
            return False
        arrives = user.arrives_within(PATIENCE_SECONDS)
        self._given_up = None if arrives else user
        return arrives

    def give_back(self, buffer: Tensor) -> None:
        """Take ``buffer`` back: its reduction has arrived, and nothing in it is needed any more."""
        if self.poison:
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every float dtype
        if all(buffer.data_ptr() != storage.data_ptr() for storage in self.storages):
            keep_for_current_stream(buffer)  # which has waited for the reduction
            self._extra -= buffer.nbytes

    def nbytes(self) -> int:
        return self._extra + sum(storage.untyped_storage().nbytes() for storage in self.storages)

    def peak_nbytes(self) -> int:
        """The most bytes so far."""
        return max(self._peak, self.nbytes())

    def deallocate(self) -> None:
        """Free the memory until a buffer is taken again, after waiting for what was lent."""
        for user in self._borrowers:
            if user is not None:
                user.wait()
        self._borrowers = [None] * COUNT
        self.allocated = False
        for storage in self.storages:
            deallocate(storage)

    def reallocate(self) -> None:
        """Take the memory of ``deallocate`` again now: it may not be there later."""
        for storage in self.storages:
            allocate(storage)
        self.allocated = True

    @property
    def idle(self) -> bool:
        """Whether taking a buffer would not wait."""
        return all(user is None or user.arrives_within(0) for user in self._borrowers)


def debug_options() -> set[str]:
    """Read ``ZERO_OPTIM_DEBUG``, a comma-separated list. Raises ValueError for an unknown word."""
    options = {word.strip() for word in os.environ.get("ZERO_OPTIM_DEBUG", "").split(",")} - {""}
    if unknown := options - {"poison", "edits"}:
        raise ValueError(f"ZERO_OPTIM_DEBUG holds {sorted(unknown)}: it knows 'poison' and 'edits'")
    return options
