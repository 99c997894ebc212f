"""Who shares what: the ranks of an optimizer, its stage, and the scale of an average over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .collectives import Comm


@dataclass(frozen=True)
class Sharding:
    """What is split over which ranks.

    A stage is a comparison: 0 nothing, >= 1 optimizer state, >= 2 gradients, >= 3 parameters.

    Attributes:
        comm: the ranks, all of which share. Today nobody repeats: there is one group.
        grad_reduce_dtype: the dtype that gradients are communicated and added up in; None: their own.
        device: where parameters, gradients and state are.
    """

    comm: Comm
    stage: int
    grad_reduce_dtype: torch.dtype | None
    device: torch.device

    @property
    def shards(self) -> int:
        """Parts that state is split into."""
        return self.comm.world_size if self.stage >= 1 else 1

    @property
    def shard(self) -> int:
        """Which of them is this rank's."""
        return self.comm.rank if self.stage >= 1 else 0

    @property
    def reduces(self) -> bool:
        """Whether gradients are averaged over several ranks."""
        return self.comm.world_size > 1

    @property
    def grad_scale(self) -> float:
        """What a rank's gradient is multiplied by, so that the sum over ranks is the average."""
        return 1 / self.comm.world_size

    @property
    def on_gloo(self) -> bool:
        """Whether the host itself waits for what is communicated."""
        return self.comm.is_gloo(self.device)

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` parameters are communicated. Alone, a rank widens nothing."""
        return self.grad_reduce_dtype or dtype if self.reduces else dtype
