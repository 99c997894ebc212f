"""Finds the first gradient that was not finite in the latest run of skipped steps, by parameter, rank and step.

Flags come from two places. ``pack`` marks gradients that were not finite on the rank that made them: the exchange of
the same step tells all ranks. ``adam_step`` marks, on a skipped step, values of a shard that are not finite: an
overflow born in the sum, which the shard's owner knows at once and the other ranks from the next exchange on. The
record stays on the device until it is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.streams import keep_tensors_of


class NonFinite:
    """The record, and what this rank has to report to the others.

    Attributes:
        marks: [parameters] int32, set by ``adam_step``.
        entries: number of fp32 values in the exchange for reports: two a rank. An entry is a parameter's index plus
            one, or 0; only its own rank writes it, so that it means the same summed and maximised.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size = rank, world_size
        self.entries = 2 * world_size
        self.marks = torch.zeros(0, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=device)  # [parameters] index
        self._steps, self._first_step = torch.zeros(2, dtype=torch.float32, device=device)
        self._was_bad, self._was_first = torch.zeros(2, dtype=torch.bool, device=device)
        self._record = torch.zeros(self.entries, dtype=torch.float32, device=device)

    def resize(self, parameters: int) -> None:
        keep_tensors_of(self)
        marks = torch.zeros(parameters, dtype=torch.int32, device=self.marks.device)
        marks[: len(self.marks)] = self.marks
        self.marks = marks
        self._numbers = torch.arange(parameters, device=self.marks.device)

    def report(self, entries: Tensor, flags: Tensor, slot_params: Tensor) -> None:
        """Fill in this rank's ``entries``, and zero the others'. ``flags`` [slots]: set by ``pack``."""
        entries.zero_()
        entries[self._rank] = _first(flags, slot_params)
        entries[self._world_size + self._rank] = _first(self.marks, self._numbers)

    def note(self, entries: Tensor, found_inf: Tensor) -> None:
        """Record every rank's reports, once a step, before the update. ``found_inf``: whether the step is skipped."""
        packed, marked = entries.split(self._world_size)
        self._steps += 1
        bad = (found_inf.reshape(()) > 0) | (packed.amax() > 0)
        first = bad & ~self._was_bad
        record_packed, record_marked = self._record.split(self._world_size)
        record_packed.copy_(torch.where(first, packed, record_packed))
        record_marked.copy_(torch.where(self._was_first, marked, record_marked * ~first))
        self._first_step.copy_(torch.where(first, self._steps, self._first_step))
        self._was_bad.copy_(bad)
        self._was_first.copy_(first)
        self.marks.zero_()

    def first(self) -> tuple[int | None, int | None, int] | None:
        """(parameter index, rank, step counted from 1), read on the host; None: every gradient was finite. Index and
        rank are None for an overflow born in the sum on another rank, in the step just made."""
        step = int(self._first_step)
        if step == 0:
            return None
        record = self._record.tolist()
        for place, entry in enumerate(record):
            if entry > 0:
                return int(entry) - 1, place % self._world_size, step
        own = int(_first(self.marks, self._numbers))
        return (own - 1, self._rank, step) if own and bool(self._was_first) else (None, None, step)


def _first(flags: Tensor, numbers: Tensor) -> Tensor:
    """[] int64: the number of the first flag that is set, plus one; 0 where none is."""
    if flags.numel() == 0:
        return flags.new_zeros((), dtype=torch.int64)
    place = flags.argmax()
    return (numbers.index_select(0, place.reshape(1)).reshape(()) + 1) * flags.amax()
