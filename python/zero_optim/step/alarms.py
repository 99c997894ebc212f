"""Alarms: errors that one rank finds and every rank raises before it updates; and how the exchange carries them.

An alarm is data. The list below decides the width of the exchange's vector, its contents in a usual step, when a step
is skipped, and what is raised. A new alarm is one entry, and the set of parameters, or the number, that the optimizer
gives it.

For each alarm a rank gives a number: of parameters that it has the alarm for, or a code where the alarm is DIFFERENT.
As a rule it is 0. The hash of the options is one alarm more, of ``HASH_BITS`` that are DIVIDED, each by itself.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.streams import HostCopy
from ..errors import GradientError, OffloadError, RankMismatchError, ZeroOptimError
from ..units.cycle import ORDER_CODES

HASH_BITS = 64
OPTIONS = "options"
"""The name of the alarm that ranks have stepped with different options."""


class Combine(enum.Enum):
    """The rule by which the ranks' numbers raise an alarm, and the alarm's width in the vector.

    ==========  =======  =======  =======  =======  =======
    combine     columns  all 0    some 0   equal    unequal
    ==========  =======  =======  =======  =======  =======
    ANY         1        quiet    raised   raised   raised
    DIVIDED     2        quiet    raised   quiet    quiet
    DIFFERENT   codes    quiet    raised   quiet    raised
    ==========  =======  =======  =======  =======  =======

    - *some 0*: at least one rank's number is 0, and at least one is not.
    - *equal*, *unequal*: no rank's number is 0.
    - *codes*: one column for each code. *1*: as many as ``bits``, which is 1 as a rule.

    So a rule needs a number other than 0 in one column, or in two. Columns are summed over the ranks.
    """

    ANY = enum.auto()
    DIVIDED = enum.auto()
    DIFFERENT = enum.auto()


@dataclass(frozen=True)
class Alarm:
    """An alarm, and the error that every rank raises.

    Attributes:
        message: of the error, with ``{names}`` of parameters and their ``{dtypes}``.
        codes: their number, where it is DIFFERENT.
        bits: how many a DIVIDED number has, and ranks that differ in any of them raise it; or the columns of ANY.
    """

    name: str
    combine: Combine
    kind: type[ZeroOptimError]
    message: str
    codes: int = 0
    bits: int = 1

    @property
    def columns(self) -> int:
        return {Combine.ANY: self.bits, Combine.DIVIDED: 2 * self.bits, Combine.DIFFERENT: self.codes}[self.combine]

    @property
    def needed(self) -> int:
        """The columns that are not 0 where it is raised."""
        return {Combine.ANY: 1, Combine.DIVIDED: self.bits + 1, Combine.DIFFERENT: 2}[self.combine]

    def entry(self, count: int) -> list[float]:
        """Make the columns of a rank's ``count``: of parameters, or the code of a DIFFERENT alarm."""
        if self.combine is Combine.ANY:
            return [float(count)] * self.bits
        if self.combine is Combine.DIVIDED:
            return [float(count > 0)] * self.bits + [float(count == 0)] * self.bits
        return [float(code == count) for code in range(self.codes)]

    def error(self, names: str, dtypes: str, own: Sequence[str]) -> ZeroOptimError:
        """Make the error, of this rank's ``own`` reasons where it has any."""
        return self.kind("; ".join(own) or self.message.format(names=names, dtypes=dtypes))


UNEQUAL = Alarm(
    "unequal",
    Combine.ANY,
    RankMismatchError,
    "ranks held different bits of parameters that should be equal, which the all-gather of a step may have replaced "
    "since: zero_optim.check_replicas names what still differs. Nothing was updated",
    bits=HASH_BITS,
)
"""The last alarm, where steps compare replicas: the ranks' numbers cancel where they are equal, see ``replicas``."""


def alarms(*, by_units: bool) -> tuple[Alarm, ...]:
    """List the alarms of a step, the one that is raised first in front. ``by_units``: at stage 3."""
    parted = Alarm(
        "parted",
        Combine.DIFFERENT,
        RankMismatchError,
        "the ranks have gathered units in different orders, and may have computed with wrong values: each must "
        "run as many forwards and backwards of the sharded model, in the same order. Nothing was updated",
        ORDER_CODES,
    )
    late_for_its_unit = (
        "a gradient of {names} arrived after the backward of its unit. Nothing was updated. Gradients "
        "must come into a unit through what its forward returns: tensors in lists, tuples, dicts or dataclasses"
    )
    late = (
        "a gradient of {names} arrived after its bucket had been reduced: it became ready more often than in "
        "the backward that was observed. Nothing was updated. Call opt.zero_grad(), and opt.observe() before a "
        "backward that uses parameters another number of times"
    )
    return (
        *((parted,) if by_units else ()),
        Alarm("late", Combine.ANY, GradientError, late_for_its_unit if by_units else late),
        Alarm(
            "offload",
            Combine.ANY,
            OffloadError,
            "another rank has lost the state of {names} to an I/O error: its own error has the cause. Make a new "
            'optimizer, with param_offload="nvme:DIR" a new model, and load a checkpoint',
        ),
        Alarm(
            "refused",
            Combine.ANY,
            GradientError,
            "the gradient of {names} on another rank cannot be used; expected a dense {dtypes}",
        ),
        Alarm(
            "thawed",
            Combine.DIVIDED,
            RankMismatchError,
            "{names} is frozen, with no gradient, on some ranks, and requires or has one on others: call "
            "requires_grad_() on every rank before the same step. Nothing was updated",
        ),
        Alarm(
            "leftover",
            Combine.DIVIDED,
            GradientError,
            "a gradient of {names} was assigned on some ranks, and not on others, after backward had reduced it: "
            "assign it on every rank, or before. Nothing was updated",
        ),
        Alarm(
            "uncounted",
            Combine.ANY,
            GradientError,
            "another rank made more backwards in this step than it called opt.count(): call it for each, with 0 where "
            "there are no new tokens. Nothing was updated",
        ),
        Alarm(
            "counting",
            Combine.DIVIDED,
            RankMismatchError,
            "opt.count() was called in this step on some ranks, and not on others: call it on every rank, with 0 where "
            "one has no tokens. Nothing was updated",
        ),
        Alarm(
            OPTIONS,
            Combine.DIVIDED,
            RankMismatchError,
            "the last step used other options on some ranks than on others: set them alike on every rank before each "
            "step. Replicas, at stage 0 and with HSDP, have different weights now: to go on, load a checkpoint. "
            "Nothing was updated now",
            bits=HASH_BITS,
        ),
        Alarm(
            "edited",
            Combine.DIVIDED,
            RankMismatchError,
            "the gradients of {names} were dropped or written in place on some ranks, and not on others, between "
            "clip_grad_norm_ and the last step, which has updated them differently. Edit gradients on every rank "
            "alike. To go on, load a checkpoint. Nothing was updated now",
        ),
    )


class AlarmColumns:
    """The alarms' part of the exchange's vector.

    Args:
        columns: [width] fp32, a view of the vector.

    Attributes:
        on_host: the columns as the host reads them.
    """

    def __init__(self, of: Sequence[Alarm], columns: Tensor) -> None:
        self._alarms, self._all, self.on_host = of, columns, HostCopy(columns)
        self._views = columns.split([alarm.columns for alarm in of]) if of else ()
        quiet = [value for alarm in of for value in alarm.entry(0)]
        self._quiet = torch.tensor(quiet, dtype=torch.float32, device=columns.device)
        # [alarms, width] bool: the columns of each alarm. It is raised where as many of them as it needs are not 0.
        masks = [torch.ones((1, alarm.columns), dtype=torch.bool, device=columns.device) for alarm in of]
        self._masks = torch.block_diag(*masks) if of else columns
        self._needed = torch.tensor([alarm.needed for alarm in of], device=columns.device)
        starts = itertools.accumulate((alarm.columns for alarm in of), initial=0)
        self._options = next(
            (slice(s, s + a.columns) for a, s in zip(of, starts, strict=False) if a.name == OPTIONS), None
        )
        self._options_version = -1

    def fill(self, counts: Mapping[str, int], options: Tensor | None = None, terms: Tensor | None = None) -> None:
        """Write this rank's columns. As a rule it has no alarm, and one copy does it.

        ``options``: [2 * HASH_BITS] fp32, the bits of the options' hash and their complements; None: of the hash 0.
        ``terms``: [HASH_BITS] fp32, those of UNEQUAL; None: this step compares no replicas.
        """
        if options is not None and self._options is not None and self._options_version != options._version:
            self._quiet[self._options].copy_(options)
            self._options_version = options._version
        self._all.copy_(self._quiet)
        for alarm, view in zip(self._alarms, self._views, strict=True):
            count = counts.get(alarm.name, 0)
            if alarm is UNEQUAL and terms is not None:
                view.copy_(terms)
            # Numbers go into kernels: a copy from the host would read memory that is gone when a graph is replayed.
            for place, value in enumerate(alarm.entry(count) if count else ()):
                view[place].fill_(value)

    def raised_on_device(self) -> Tensor:
        """[1] fp32: 1 where one is raised, else 0."""
        if not self._alarms:  # a rank alone
            return self._all.new_zeros(1)
        return (self._masks & (self._all != 0)).sum(1).ge(self._needed).any(0, keepdim=True).float()

    def read_first_raised(self) -> Alarm | None:
        """Read the columns that were sent last, once, and pick the alarm to raise. The host waits for them."""
        values, start = self.on_host.read(wait=True) or [], 0
        for alarm in self._alarms:
            if sum(map((0.0).__ne__, values[start : start + alarm.columns])) >= alarm.needed:
                return alarm
            start += alarm.columns
        return None
