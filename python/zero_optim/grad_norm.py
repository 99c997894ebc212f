"""Phase 2 of a step: what all ranks must know of the gradients, in one small all-reduce, and one device scalar from it.

The vector: ``[norm term, non-finite count, late count, used count of each parameter ...]``. It is summed for
finite norms and maximised for the infinity norm; every part means the same under either.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .bucket import Bucket, Sharding
from .errors import GradientError

_HEADER = 3
_LATE = 65536  # marks a late parameter in its used count; exact in fp32 for 255 ranks that are late at once


class GradNorm:
    """Norm, overflow and use of the gradients of one step, as device tensors.

    Attributes:
        exchanged: whether the values below are those of the gradients as they are.
        norm: [] fp32, norm of the averaged gradients before clipping, still times the loss scale where nobody
            unscaled.
        used: [parameters] bool, whether any rank has a gradient for it.
        found_inf: [1] fp32, not 0 where the step must be skipped on every rank.
        clip: [1] fp32, multiplies the gradients where ``clipped``.
        skipped: [] fp32, steps skipped so far.
    """

    def __init__(self, sharding: Sharding, labels: Sequence[str], device: torch.device) -> None:
        self.sharding, self.labels = sharding, labels
        self.exchanged = self.clipped = False
        self.norm = torch.zeros((), device=device)
        self.used = torch.zeros(len(labels), dtype=torch.bool, device=device)
        self.found_inf = torch.zeros(1, device=device)
        self.clip = torch.ones(1, device=device)
        self.skipped = torch.zeros((), device=device)
        self._vector = torch.zeros(_HEADER + len(labels), device=device)
        self._late = _LateFlag(self._vector[2:3])

    def reset(self) -> None:
        self.exchanged = self.clipped = False

    def discard(self) -> None:
        """A backward begins: what was exchanged is no longer what the gradients are."""
        if self.clipped:
            warnings.warn(
                "a backward after clip_grad_norm_ discards its coefficient: call it after the last backward of a step",
                stacklevel=2,
            )
        self.reset()

    def exchange(
        self,
        buckets: Sequence[Bucket],
        used: bytearray,
        late: set[int],
        norm_type: float | None,
        skip_nonfinite: bool,
    ) -> None:
        """Fill in norm, used and found_inf. ``used``: a byte a parameter; ``norm_type`` None: no norm is wanted.

        Raises GradientError, on every rank, where any rank has a ``late`` gradient (on CUDA: one step later).
        """
        self._late.check(self._raise_late)
        maximum = norm_type == math.inf
        wanted = norm_type is not None or skip_nonfinite
        self._vector[:2] = self._local_totals(buckets, 2.0 if norm_type is None else norm_type) if wanted else 0.0
        self._vector[2].fill_(len(late))
        self._vector[_HEADER:].copy_(_to_device(used, self._vector.device), non_blocking=True)
        for index in late:
            self._vector[_HEADER + index].add_(_LATE)
        self.sharding.comm.exchange(self._vector, maximum=maximum)
        self._late.watch()
        self._late.check(self._raise_late)
        if norm_type is not None:
            torch.pow(self._vector[0], 1.0 if maximum else 1.0 / norm_type, out=self.norm)
        torch.gt(self._vector[_HEADER:], 0, out=self.used)
        nonfinite = self._vector[1:2] if skip_nonfinite else 0.0
        self.found_inf.copy_(self._vector[2:3] + nonfinite > 0)
        self.exchanged = True

    def _local_totals(self, buckets: Sequence[Bucket], norm_type: float) -> Tensor:
        """[2]: this rank's term of the norm, and its count of non-finite values."""
        stats = torch.stack([torch.ops.zero_kernels.grad_stats(bucket.grad_shard, norm_type) for bucket in buckets])
        totals = stats.sum(0)
        if norm_type == math.inf:
            totals[0] = stats[:, 0].max()
        if self.sharding.shards == 1 and self.sharding.comm.rank > 0:
            totals.zero_()  # every rank holds the same gradients: rank 0 speaks for all
        return totals

    def set_clip(self, max_norm: float, inverse_scale: Tensor | None) -> Tensor:
        """Clip to ``max_norm`` as torch's ``clip_grad_norm_`` does. Returns the norm before it, unscaled if asked."""
        norm = self.norm if inverse_scale is None else self.norm * inverse_scale.reshape(())
        self.clip.copy_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.clipped = True
        return norm.clone()

    def _raise_late(self) -> None:
        names = [self.labels[i] for i, count in enumerate(self._vector[_HEADER:].tolist()) if count >= _LATE]
        self.reset()
        raise GradientError(
            f"a gradient of {', '.join(names) or 'a parameter'} arrived after its bucket had been reduced: it became "
            "ready more often than in the backward that was observed. Nothing was updated. Call opt.zero_grad(), and "
            "opt.observe() before a backward that uses parameters another number of times"
        )


class _LateFlag:
    """The late count on the host without a host sync: read at once on CPU, on CUDA when a copy of it has arrived."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag
        self._host = torch.zeros(1, pin_memory=True) if flag.is_cuda else flag
        self._memory = ctypes.c_float.from_address(self._host.data_ptr())
        self._event = torch.cuda.Event() if flag.is_cuda else None

    def watch(self) -> None:
        if self._event is not None:
            self._host.copy_(self._flag, non_blocking=True)
            self._event.record()

    def check(self, fail: Callable[[], object]) -> None:
        if (self._event is None or self._event.query()) and self._memory.value > 0:
            self._memory.value = 0.0
            fail()


def _to_device(flags: bytearray, device: torch.device) -> Tensor:
    host = torch.frombuffer(flags, dtype=torch.uint8)
    return host.pin_memory() if device.type == "cuda" else host
