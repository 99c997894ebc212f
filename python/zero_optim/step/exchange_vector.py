"""The vector that the ranks exchange in a step, and its layout.

::

    norm term | non-finite count | alarms ... | used count of each parameter ... | alarm count of each parameter ...
    | reports of non-finite gradients ...

An expert has a used count for each of the parameters that ranks have under its name: one may be used, and another not.

It is summed for finite norms and maximised for the infinity norm; every part means the same under either. A rank adds 0
or 1 to each count: in any order fp32 adds up to 2^24 ranks without rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_kernels import is_capturing

from .alarms import Alarm, AlarmColumns, width

_TOTALS = 2  # the norm term and the non-finite count


class ExchangeVector:
    """The vector, with a view for each part.

    Args:
        of: the alarms that it carries; without any it does not name parameters either.
        places: of each parameter, the number of its used counts, and the number of this rank's among them.
        reports: entries for reports of non-finite gradients.

    Attributes:
        all: fp32, the vector. The others are views of it.
        totals: [2] the norm term and the non-finite count.
        alarms: their columns.
        used_counts: [parameters, and more of experts] how many ranks use each.
        reports: [reports]
    """

    def __init__(
        self, of: Sequence[Alarm], places: Sequence[tuple[int, int]], reports: int, device: torch.device
    ) -> None:
        counts = [count for count, _ in places]
        sizes = [_TOTALS, width(of), sum(counts), len(places) if of else 0, reports]
        self.all = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.totals, columns, self.used_counts, self._named_counts, self.reports = self.all.split(sizes)
        self.alarms = AlarmColumns(of, columns)
        self._own_counts: Tensor | None = None  # [parameters] int64, the places of this rank's counts; None: all
        if sum(counts) > len(places):
            starts = itertools.accumulate(counts, initial=0)
            own = [start + number for start, (_, number) in zip(starts, places, strict=False)]
            self._own_counts = torch.tensor(own, dtype=torch.int64, device=device)

    def put_use(self, used: Tensor) -> None:
        """Write what this rank uses: [parameters] fp32."""
        if self._own_counts is None:
            self.used_counts.copy_(used)
        else:
            self.used_counts.zero_().index_copy_(0, self._own_counts, used)

    def use(self) -> Tensor:
        """[parameters] fp32, the number of ranks that use each of this rank's parameters."""
        return self.used_counts if self._own_counts is None else self.used_counts.index_select(0, self._own_counts)

    def name(self, parameters: Iterable[int]) -> None:
        """Name the parameters that this rank's alarms are about, by index."""
        self._named_counts.zero_()
        for index in parameters:
            self._named_counts[index].fill_(1.0)

    def named(self) -> list[int]:
        """List the parameters that any rank has named. Reads device values: for an alarm that is raised."""
        return [index for index, count in enumerate(self._named_counts.tolist()) if count > 0]


class OwnUse:
    """The use of parameters by this rank, on the device. As a rule it is as in the step before: nothing is copied."""

    def __init__(self, parameters: int, device: torch.device) -> None:
        self._here = torch.zeros(parameters, dtype=torch.float32, device=device)  # as last sent there
        self._sent = bytearray(parameters)

    def on_device(self, used: bytearray) -> Tensor:
        """Bring ``used``, a byte a parameter, to the device, as fp32 [parameters]."""
        if is_capturing(self._here.device):
            # A copy from the host would read, at every replay, memory that is long gone: the values go into kernels.
            flags = torch.ones_like(self._here)
            for index in (index for index, flag in enumerate(used) if not flag):
                flags[index].zero_()
            return flags
        if used != self._sent:
            host = torch.frombuffer(used, dtype=torch.uint8).float()
            self._here.copy_(host.pin_memory() if self._here.is_cuda else host, non_blocking=True)
            self._sent = bytearray(used)
        return self._here
