"""Factors of the gradients of the next step: clipping, of all or of some, the loss scale, tokens; and the norms for it.

No gradient is touched: ``adam_step`` multiplies as it loads. All factors are device tensors, never read by the host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.sharding import Sharding
from ..grads.bucket import Bucket
from ..grads.slots import GradState
from .exchange import Exchange, to_device
from .pipeline import Pipeline

EXCHANGED_NORMS = (1.0, 2.0)
"""Norms of which the exchange of a step adds up a term."""

KERNEL_NORMS = (*EXCHANGED_NORMS, math.inf)
"""Norms that ``grad_stats`` takes in one read, in one order of additions on every backend."""

_CHUNK = 2**22  # elements handled at once: bounds what a power takes to some 100 MB


def unscale_in_place(buffers: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply gradients by ``inverse_scale``, [1] fp32, as ``torch.amp.GradScaler`` does: in fp32, rounded once.

    Args:
        found_inf: [1] fp32, where torch's op writes whether it has found an inf or a NaN. It is left alone for bf16 on
            CUDA, for which torch has no such op.
    """
    for dtype in {buffer.dtype for buffer in buffers}:
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        if dtype == torch.bfloat16 and inverse_scale.is_cuda:
            for buffer in alike:
                buffer.mul_(inverse_scale)  # an element in fp32, of [1] fp32, and rounded
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found_inf, inverse_scale)


class Clip:
    """The factors of one step.

    Attributes:
        clipped: whether ``clip_grad_norm_`` was called for this step.
        coefficient: [1] fp32, multiplies all gradients where ``clipped``.
        factor: [parameters] fp32, multiplies the gradients of each; None: no subset was clipped.
        inverse_scale: [1] fp32, multiplies the gradients of the next step; None: they are unscaled.
        token_scale: [1] fp32, multiplies them, too, where tokens are counted; None: they are not.
        scaled: whether a GradScaler takes part in the next step.
        inverse_loss_scale: [1] fp32, what a GradScaler has given for the next step, applied already or not.
    """

    def __init__(self, sharding: Sharding, labels: Sequence[str], pipeline: Pipeline | None = None) -> None:
        self.sharding, self.labels, self._pipeline = sharding, labels, pipeline
        self.coefficient = torch.ones(1, dtype=torch.float32, device=sharding.device)
        self.clipped = False
        self.factor: Tensor | None = None
        self.inverse_scale: Tensor | None = None
        self.inverse_loss_scale: Tensor | None = None
        self.token_scale: Tensor | None = None
        self.scaled = False
        self._subsets: dict[tuple[int, ...], Tensor] = {}

    def resize(self) -> None:
        """Make room for as many parameters as there are labels. What was clipped stays so."""
        if self.factor is not None:
            self.factor = torch.cat([self.factor, self.factor.new_ones(len(self.labels) - len(self.factor))])
        self._subsets = {}

    def reset(self) -> None:
        """Forget all factors: the step is over, or its gradients were dropped."""
        self.unclip()
        self.inverse_scale = self.inverse_loss_scale = self.token_scale = None
        self.scaled = False

    def unclip(self) -> None:
        self.clipped, self.factor = False, None

    def discard(self) -> None:
        """Forget clipping, and warn: gradients come, or may have come on some rank, after they were clipped."""
        if self.clipped:
            warnings.warn(
                "a backward after clip_grad_norm_ discards its coefficient: call it after the last backward of a step",
                stacklevel=2,
            )
        self.unclip()

    def grad_scale(self) -> Tensor | None:
        """[1] fp32, the factor of every gradient; None: there is none."""
        factors = [self.coefficient if self.clipped else None, self.inverse_scale, self.token_scale]
        there = [factor for factor in factors if factor is not None]
        return math.prod(there[1:], start=there[0]) if there else None

    def clip_to(
        self,
        max_norm: float,
        norm_type: float,
        exchange: Exchange,
        buckets: Sequence[Bucket],
        subset: Sequence[int] | None = None,
    ) -> Tensor:
        """Clip all gradients, or those of ``subset``, after an exchange, as torch's ``clip_grad_norm_`` does.

        Returns the norm before this call and after earlier calls of the step; unscaled if asked for. [] fp32.
        """
        device = self.sharding.device
        if not self.clipped:
            self.coefficient.fill_(1.0)
        if subset is None and not self.clipped and norm_type == exchange.norm_type:
            norm = root(exchange.totals[0], norm_type)
        else:
            found = norms_over(self.sharding.world, self._parts(buckets, norm_type, subset), norm_type, device)
            if self._pipeline is not None:
                found = norms_over(self._pipeline.comm, found, norm_type, device)
            norm = found.norm(norm_type).reshape(())
        for factor in (self.coefficient, self.inverse_scale, self.token_scale):
            norm = norm if factor is None else norm * factor.reshape(())
        norm = norm.float()
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if subset is None:
            self.coefficient.mul_(coefficient)
        else:
            factor = torch.where(self._mask(subset), coefficient, 1.0)
            self.factor = factor if self.factor is None else self.factor * factor
        self.clipped = True
        return norm

    def _parts(self, buckets: Sequence[Bucket], norm_type: float, subset: Sequence[int] | None) -> Norms | None:
        """Measure the gradients of ``subset`` that this rank counts, each times its factor; None: there are none."""
        held = [bucket for bucket in buckets if bucket.state is not GradState.EMPTY and bucket.counted_in_norm]
        if subset is None and self.factor is None:  # whole shards: gaps between gradients are zero
            counted = [part for bucket in held for part in bucket.counted()]
            return Norms.of(counted, norm_type) if counted else None
        wanted = set(range(len(self.labels)) if subset is None else subset)
        pieces = [
            (bucket.grad_shard.narrow(0, piece.in_shard, piece.numel), piece.slot.param)
            for bucket in held
            for index, piece in enumerate(bucket.pieces)
            if piece.slot.param in wanted and piece.numel and index not in bucket.duplicates
        ]
        if not pieces:
            return None
        parts = Norms.of([piece for piece, _ in pieces], norm_type)
        if self.factor is None:
            return parts
        indices = to_device(self.factor.device, [index for _, index in pieces], torch.int64)
        return Norms(parts.largest * self.factor.index_select(0, indices), parts.total)

    def _mask(self, subset: Sequence[int]) -> Tensor:
        """[parameters] bool, True in ``subset``."""
        key = tuple(subset)
        if key not in self._subsets:
            members = set(subset)
            every = [index in members for index in range(len(self.labels))]
            mask = to_device(self.sharding.device, every, torch.bool)
            self._subsets = {**self._subsets, key: mask} if len(self._subsets) < 64 else {key: mask}
        return self._subsets[key]


# -- an average over tokens -------------------------------------------------------------------------------------------


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
        self._calls = 0

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
        """Say where a step of so many ``backwards`` has fewer calls, but some; else None."""
        if not (self._compares and 0 < self._calls < backwards):
            return None
        return (
            f"this step has {backwards} backwards, and opt.count() was called for {self._calls} of them: call it for "
            "every micro-batch, with 0 for a further backward over the same tokens, and opt.zero_grad() before a "
            "backward is repeated. Nothing was updated"
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

    def reset(self) -> None:
        """Forget all counts: the step is over, or its gradients were dropped."""
        if self._calls:
            self.own.zero_()
        self.scale = self.empty = None
        self._calls = 0


# -- norms over ranks --------------------------------------------------------------------------------------------------


def root(power_sum: Tensor, norm_type: float) -> Tensor:
    """Make the norm of the sum of |g|^p; for inf, of the largest |g|."""
    return power_sum.clone() if norm_type == math.inf else power_sum.pow(1.0 / norm_type)


@dataclass(frozen=True)
class Norms:
    """Norms of several parts, that neither overflow nor underflow: ``largest * total ** (1 / p)`` each.

    |g|^64 leaves fp32 where |g| is above 4 or below 0.2, and float64 not much later. So no power of a gradient is added
    up as it is::

        of a gradient        its largest |g|, and the sum of (|g| / largest)^p: each term at most 1, one of them 1
        of several of them   the largest of these, and the sum of total * (largest_i / largest)^p

    A norm of 1 or 2 is what a kernel has added up in fp32; that of inf is ``largest`` by itself.

    Attributes:
        largest, total: [parts] float64.
    """

    largest: Tensor
    total: Tensor

    @classmethod
    def of(cls, gradients: Sequence[Tensor], norm_type: float) -> Norms:
        """Measure flat fp16, bf16 or fp32 tensors, at least one."""
        in_kernel = norm_type in KERNEL_NORMS
        stats = torch.ops.zero_kernels.grad_stats(gradients, norm_type if in_kernel else math.inf)[:, 0].double()
        if in_kernel:
            largest = root(stats, norm_type)
            return cls(largest, torch.ones_like(largest))
        totals = [
            # [] float64, the sum of (|g| / largest)^p, some elements at a time
            torch.stack([(part.double().abs() / divisor).pow(norm_type).sum() for part in g.split(_CHUNK)]).sum()
            for g, divisor in zip(gradients, _divisor(stats), strict=True)
        ]
        return cls(stats, torch.stack(totals))

    def together(self, norm_type: float) -> Norms:
        """Combine all parts into one: [1] each."""
        largest = self.largest.amax(0, keepdim=True)
        total = self.total * (self.largest / _divisor(largest)) ** norm_type
        return Norms(largest, total.sum(0, keepdim=True))

    def norm(self, norm_type: float) -> Tensor:
        """[parts] float64."""
        return self.largest * self.total ** (1.0 / norm_type)


def norms_over(comm: Comm, here: Norms | None, norm_type: float, device: torch.device) -> Norms:
    """Collective: one small all-reduce. Combine the parts of all ranks of ``comm`` into one; ``here`` None: no parts.

    Each rank has two places of its own in the vector, to which the others add 0: parts can be scaled, and added up,
    only once the largest is known.
    """
    vector = torch.zeros(2, comm.world_size, dtype=torch.float32, device=device)
    if here is not None:
        one = here.together(norm_type)
        vector[0, comm.rank : comm.rank + 1].copy_(one.largest)
        vector[1, comm.rank : comm.rank + 1].copy_(one.total)
    comm.exchange(vector)
    largest, total = vector.double()
    return Norms(largest, total).together(norm_type)


def _divisor(largest: Tensor) -> Tensor:
    """``largest``, by which parts can be divided: 1 where all of them are 0, or one is not finite."""
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
