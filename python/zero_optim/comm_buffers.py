"""The two buffers that gradients are packed into and received in, lent to one bucket after another."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .bucket import Bucket


class CommBuffers:
    """Two buffers as large as the largest bucket, lent in turn. Taking one waits for the bucket that used it last.

    With ``ZERO_OPTIM_DEBUG=poison`` what was communicated is overwritten with NaN once it has been used: whoever reads
    it later is found out.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storages = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._users: list[Bucket | None] = [None, None]
        self.poison = "poison" in debug_options()

    def take(self, bucket: Bucket) -> Tensor:
        """A buffer [bucket.numel] of the bucket's reduce dtype, its contents undefined."""
        self.storages.reverse()
        self._users.reverse()
        if self._users[0] is not None:
            self._users[0].wait()
        self._users[0] = bucket
        return self.storages[0][: bucket.layout.numel * bucket.reduce_dtype.itemsize].view(bucket.reduce_dtype)

    @property
    def free(self) -> bool:
        """Whether taking one would not wait."""
        return all(user is None or user.pending is None or user.pending.arrived for user in self._users)

    def release(self, bucket: Bucket) -> None:
        """The bucket's reduction has arrived: nothing in the buffers lent to it is needed any more."""
        for storage, user in zip(self.storages, self._users, strict=True):
            if self.poison and user is bucket:
                storage.fill_(0xFF)  # NaN in every float dtype
        if self.poison and bucket.keeps_full and bucket.sharding.stage >= 1:  # reduced in place: others' shards
            kept = bucket.grad_shard.clone()
            bucket.grad_buffer.fill_(math.nan)
            bucket.grad_shard.copy_(kept)


def debug_options() -> set[str]:
    """What ``ZERO_OPTIM_DEBUG`` asks for: a comma-separated list. Raises ValueError for an unknown word."""
    options = {word.strip() for word in os.environ.get("ZERO_OPTIM_DEBUG", "").split(",")} - {""}
    if options - {"poison"}:
        raise ValueError(f"ZERO_OPTIM_DEBUG holds {sorted(options - {'poison'})}, but knows 'poison' alone")
    return options
