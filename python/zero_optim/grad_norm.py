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

from zero_kernels import is_capturing

from .bucket import Bucket, GradState, Sharding
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
        self._late = _LateFlag(self._vector[2:3], sharding.reduces)
        self._used_here = torch.zeros(len(labels), device=device)  # [parameters] fp32, as last sent to the device
        self._used_sent = bytearray(len(labels))

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
        self, buckets: Sequence[Bucket], used: bytearray, late: set[int], norm_type: float | None, *, stats: bool
    ) -> None:
        """Fill in norm and used. ``used``: a byte a parameter; ``norm_type`` None: no norm is wanted.

        ``stats`` False: nor is the non-finite count, so that no gradient is read.

        Raises GradientError, on every rank, where any rank has a ``late`` gradient (on CUDA: one step later).
        """
        self._late.check_last(self._raise_late)
        maximum = norm_type == math.inf
        wanted = norm_type is not None or stats
        self._vector[:2] = self._local_totals(buckets, 2.0 if norm_type is None else norm_type) if wanted else 0.0
        self._vector[2].fill_(len(late))
        self._vector[_HEADER:].copy_(self._on_device(used))
        for index in late:
            self._vector[_HEADER + index].add_(_LATE)
        self.sharding.comm.exchange(self._vector, maximum=maximum)
        self._late.check_this(self._raise_late)
        if norm_type is not None:
            torch.pow(self._vector[0], 1.0 if maximum else 1.0 / norm_type, out=self.norm)
        torch.gt(self._vector[_HEADER:], 0, out=self.used)
        self.exchanged = True

    def _on_device(self, used: bytearray) -> Tensor:
        """``used`` as fp32 on the device, [parameters]. As a rule it is that of the step before, and is there."""
        if is_capturing(self._used_here.device):
            # A copy from the host would read, at every replay, memory that is long gone: the values go into kernels.
            flags = torch.ones_like(self._used_here)
            for index in (index for index, flag in enumerate(used) if not flag):
                flags[index].zero_()
            return flags
        if used != self._used_sent:
            host = torch.frombuffer(used, dtype=torch.uint8).float()
            self._used_here.copy_(host.pin_memory() if self._used_here.is_cuda else host, non_blocking=True)
            self._used_sent = bytearray(used)
        return self._used_here

    def decide(self, skip_nonfinite: bool) -> None:
        """Fill in found_inf. A late gradient always skips the step, a non-finite one if asked."""
        nonfinite = self._vector[1:2] if skip_nonfinite else 0.0
        self.found_inf.copy_(self._vector[2:3] + nonfinite > 0)

    def drop(self, indices: Sequence[int]) -> None:
        """These gradients were dropped after the exchange, on every rank: their parameters are not updated."""
        for index in indices:
            self.used[index].fill_(False)  # `used[index] = False` would copy from the host and wait for it

    def _local_totals(self, buckets: Sequence[Bucket], norm_type: float) -> Tensor:
        """[2]: this rank's term of the norm, and its count of non-finite values."""
        shards = [bucket.grad_shard for bucket in buckets if bucket.state is not GradState.EMPTY]
        if not shards:
            return torch.zeros(2, device=self._vector.device)
        stats = torch.ops.zero_kernels.grad_stats(shards, norm_type)
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
    """The late count on the host. A CPU's is read at once; a GPU's one step later, at the same place on every rank."""

    def __init__(self, flag: Tensor, reduces: bool) -> None:
        self._flag = flag
        self._reduces = reduces  # alone, a rank is never late
        self._host = torch.zeros(1, pin_memory=True) if flag.is_cuda else flag
        self._memory = ctypes.c_float.from_address(self._host.data_ptr())
        self._event = torch.cuda.Event() if flag.is_cuda else None
        self._watched = False

    def check_this(self, fail: Callable[[], object]) -> None:
        """Right after the exchange."""
        if not self._reduces or is_capturing(self._flag.device):
            return
        if self._event is None:
            self._check(fail)
        else:
            self._host.copy_(self._flag, non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._flag.device))
            self._watched = True

    def check_last(self, fail: Callable[[], object]) -> None:
        """In the next step: the copy made in the last one has arrived, or the host is a step ahead and waits for it."""
        if self._event is not None and self._watched and not is_capturing(self._flag.device):
            self._watched = False
            self._event.synchronize()
            self._check(fail)

    def _check(self, fail: Callable[[], object]) -> None:
        if self._memory.value > 0:
            self._memory.value = 0.0
            fail()
