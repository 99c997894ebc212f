"""Phase 2 of a step: what all ranks must know of the gradients, in one small all-reduce.

The vector: ``[norm term, non-finite count, alarms ..., used count of each parameter ..., alarm count of each
parameter ..., reports of non-finite gradients ...]``. It is summed for finite norms and maximised for the infinity
norm; every part means the same under either. ``alarms`` has what a step fails for, ``clip`` what the norm is used for.

A rank adds 0 or 1 to each count: fp32 adds up as many ranks as there are, 2^24 of them, without rounding in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.host_copy import HostCopy
from ..comm.sharding import Sharding
from ..comm.streams import keep_tensors_of
from ..grads.bucket import Bucket
from ..grads.slots import GradState
from .alarms import About, AlarmColumns, alarms, width
from .nonfinite import NonFinite

_TOTALS = 2  # the norm term and the non-finite count


class Exchange:
    """Norm, overflow and use of the gradients of one step, as device tensors.

    Attributes:
        current: whether the values below are those of the gradients as they are.
        norm_type: of the norm that was exchanged; None: no norm was.
        with_stats: whether the non-finite count was.
        used: [parameters] bool, whether any rank has a gradient for it.
        found_inf: [1] fp32, not 0 where the step must be skipped on every rank.
        skipped: [] fp32, steps skipped so far.
    """

    def __init__(
        self,
        sharding: Sharding,
        labels: Sequence[str],
        parameters: Mapping[int, Tensor],
        *,
        by_units: bool,
        at_once: bool = False,
    ) -> None:
        """``at_once``: the host waits for every exchange, so that alarms are raised in the same step on all ranks."""
        self.sharding, self.labels, self._parameters = sharding, labels, parameters
        device = sharding.device
        self.nonfinite = NonFinite(sharding.rank, sharding.world_size, device)
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._at_once = at_once
        self.current = False
        self.norm_type: float | None = None
        self.with_stats = False
        self._edited: set[int] = set()  # parameters, since the last exchange
        self._alarms = alarms(by_units=by_units) if sharding.reduces else ()  # alone, a rank has none
        self.resize()

    def outdate(self) -> None:
        """The gradients change, or have gone: what was exchanged is no longer what they are. On all ranks alike."""
        self.current = False

    def follow_edits(self, dropped: Set[int], written: Set[int]) -> None:
        """The user has done this to the gradients of these parameters, by index, since they were exchanged.

        What was dropped is unused, here. The next exchange tells the ranks if only some of them have edited.
        """
        for index in dropped:
            self.used[index].fill_(False)
        self._edited |= dropped | written

    def resize(self) -> None:
        """Make room for as many parameters as there are labels."""
        device, count = self.sharding.device, len(self.labels)
        self.outdate()
        keep_tensors_of(self)
        self.used = torch.zeros(count, dtype=torch.bool, device=device)
        self.nonfinite.resize(count)
        named = count if self._alarms else 0
        sizes = [_TOTALS, width(self._alarms), count, named, self.nonfinite.entries]
        self._vector = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._totals, columns, self._used_counts, self._named_counts, self._reports = self._vector.split(sizes)
        self._columns = AlarmColumns(self._alarms, columns)
        self._on_host = HostCopy(columns) if self._alarms else None
        self._used_here = torch.zeros(count, dtype=torch.float32, device=device)  # [parameters] as last sent there
        self._used_sent = bytearray(count)

    @property
    def total(self) -> Tensor:
        """[] fp32: the sum of |g|^p of all gradients, or their largest; of the ``norm_type`` exchanged."""
        return self._totals[0]

    def run(
        self,
        buckets: Sequence[Bucket],
        used: bytearray,
        norm_type: float | None,
        *,
        stats: bool,
        about: Mapping[str, Set[int]],
        order_code: int,
        own: Mapping[str, Sequence[str]],
        flags: tuple[Tensor, Tensor],
    ) -> None:
        """Collective. Fill in the norm and what is used.

        Args:
            used: a byte a parameter, 1 where this rank has a gradient for it.
            norm_type: None: no norm is wanted.
            stats: False: nor is the non-finite count, so that no gradient is read.
            about: by alarm, the parameters that this rank raises it for.
            order_code: what this rank says for the alarm "parted".
            own: by alarm, this rank's reasons in words.
            flags: which slots were not finite as they were packed, and the parameters of the slots.

        Raises what the alarms raise, on every rank, before anything is updated. On CUDA a rank without a part in it
        raises one step later, and the step in between is skipped: the host reads nothing from the device.
        """
        self.check_alarms()
        about, self._edited = {**about, "edited": self._edited}, set()
        wanted = norm_type is not None or stats
        self._totals.copy_(self._local_totals(buckets, norm_type or 2.0)) if wanted else self._totals.zero_()
        self._columns.fill({name: len(of) for name, of in about.items()} | {"parted": order_code})
        self._used_counts.copy_(self._on_device(used))
        self._named_counts.zero_()
        for index in set().union(*about.values()) if self._alarms else ():
            self._named_counts[index].fill_(1.0)
        self.nonfinite.report(self._reports, *flags)
        self.sharding.exchange(self._vector, maximum=norm_type == math.inf)
        if self._on_host is not None and not is_capturing(self.sharding.device):
            self._on_host.send()
            if self._on_host.immediate or self._at_once or any(about.values()):
                self._raise_alarm(own)
        torch.gt(self._used_counts, 0, out=self.used)
        self.current, self.norm_type, self.with_stats = True, norm_type, stats

    def check_alarms(self) -> None:
        """Raise what a GPU has reported of the last step. It has arrived, or the host is a step ahead and waits."""
        if self._on_host is not None and not is_capturing(self.sharding.device):
            self._raise_alarm({})

    def _raise_alarm(self, own: Mapping[str, Sequence[str]]) -> None:
        values = self._on_host.read(wait=True) if self._on_host is not None else None
        alarm = self._columns.first_raised(values) if values is not None else None
        if alarm is not None:
            named = [index for index, count in enumerate(self._named_counts.tolist()) if count > 0]
            names = ", ".join(self.labels[index] for index in named) or "a parameter"
            dtypes = {str(self._parameters[index].dtype) for index in named if index in self._parameters}
            self.outdate()
            raise alarm.error(About(names, own.get(alarm.name, ()), " or ".join(sorted(dtypes))))

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

    def overflowed(self) -> Tensor:
        """[1] fp32: not 0 where a gradient of any rank is not finite."""
        return (self._totals[1:] > 0).float()

    def decide(self, skip_nonfinite: bool) -> None:
        """Fill in found_inf. What an alarm is raised for always skips; a non-finite gradient if asked."""
        nonfinite = self._totals[1:] if skip_nonfinite else 0.0
        self.found_inf.copy_(self._columns.raised_on_device() + nonfinite > 0)
        self.nonfinite.note(self._reports, self.found_inf)

    def _local_totals(self, buckets: Sequence[Bucket], norm_type: float) -> Tensor:
        """[2]: this rank's term of the norm, and its count of non-finite values."""
        shards = [bucket.grad_shard for bucket in buckets if bucket.state is not GradState.EMPTY]
        if not shards:
            return torch.zeros(2, dtype=torch.float32, device=self.sharding.device)
        stats = torch.ops.zero_kernels.grad_stats(shards, norm_type)
        totals = stats.sum(0)
        if norm_type == math.inf:
            totals[0] = stats[:, 0].max()
        return counted_once(self.sharding, totals)


def counted_once(sharding: Sharding, totals: Tensor) -> Tensor:
    """Where every rank holds the same gradients, rank 0 speaks for all."""
    return totals if sharding.speaks else totals.zero_()
