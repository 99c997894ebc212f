"""The tokens that the ranks have counted for a step, and the scale that makes a sum over them an average."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from ..comm.sharding import Sharding


class TokenCount:
    """Counts this rank's tokens, on the device: see ``ShardedOptimizer.count``.

    Reductions divide gradients by N, the number of data-parallel ranks. Where tokens are counted, the update multiplies
    by N / total as well. Experts, whose sums are divided by ``grad_divisor``, are multiplied by the same scale.

    Attributes:
        own: [1] float64, what this rank adds to the total. Tensor-parallel ranks have the same tokens: the first of
            them adds them.
        scale: [1] fp32, N / total; None: nothing was counted.
        empty: [1] bool, whether no rank has counted a token, so that the step has to be skipped.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._ranks = sharding.world_size
        self._adds = sharding.tensor_ranks is None or sharding.tensor_ranks.slices.rank == 0
        self.own = torch.zeros(1, dtype=torch.float64, device=sharding.device)
        self.scale: Tensor | None = None
        self.empty: Tensor | None = None
        # Of a pipeline a rank may have several stages, and a backward of each for one micro-batch.
        self._compares = sharding.pipeline_stages == 1
        self._calls, self._backwards_before = 0, 0

    @property
    def counting(self) -> bool:
        """Whether this rank has counted tokens for the next step."""
        return self._calls > 0

    def add(self, tokens: float | Tensor) -> None:
        """Add the tokens of a micro-batch."""
        if isinstance(tokens, Tensor):
            if tokens.numel() != 1 or tokens.is_complex():
                raise TypeError(f"count takes a number or a tensor of one element, got one of {tuple(tokens.shape)}")
            if tokens.device not in (self.own.device, torch.device("cpu")):
                raise ValueError(f"count got a tensor on {tokens.device}: move it to {self.own.device}")
            tokens = tokens.detach().reshape(())
        elif not isinstance(tokens, Real):
            raise TypeError(f"count takes a number or a tensor of one element, got a {type(tokens).__name__}")
        elif not 0 <= tokens < math.inf:
            raise ValueError(f"count takes a number of tokens, 0 or more, got {tokens}")
        if self._adds:
            self.own.add_(tokens)
        self._calls += 1

    def uncounted(self, backwards: int) -> str | None:
        """Say where this step has more backwards than calls; else None. ``backwards``: since the optimizer was made."""
        of_step = backwards - self._backwards_before
        if not (self._compares and 0 < self._calls < of_step):
            return None
        return (
            f"opt.count() was called {self._calls} times in this step, which has {of_step} backwards: call it for "
            "every micro-batch, with 0 for a further backward over the same tokens. Nothing was updated"
        )

    def average(self, total: Tensor, counting: Tensor | None = None) -> None:
        """Make the scale of the ``total`` over all ranks, [1] fp32. ``counting``: [1] bool, whether there is one;
        None: there is."""
        fits = (total > 0) & total.isfinite()
        self.scale = torch.where(fits, self._ranks / total, 1.0)
        self.empty = ~fits
        if counting is not None:
            self.scale = torch.where(counting, self.scale, 1.0)
            self.empty &= counting

    def reset(self, backwards: int) -> None:
        """Forget all counts: the step is over, or its gradients were dropped."""
        if self._calls:
            self.own.zero_()
        self.scale = self.empty = None
        self._calls, self._backwards_before = 0, backwards
