"""Alarms: errors that one rank finds and every rank raises before it updates; and how the exchange carries them.

An alarm is data. The list below decides the width of the exchange's vector, its contents in a usual step, when a step
is skipped, and what is raised. A new alarm is one entry, and the set of parameters that the optimizer gives it.

For each alarm a rank gives a number: of parameters that it has the alarm for, or a code where the alarm is DIFFERENT.
As a rule it is 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.streams import HostCopy
from ..errors import GradientError, OffloadError, RankMismatchError, ZeroOptimError
from ..units.cycle import ORDER_CODES


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
    - *codes*: one column for each code.

    Columns are summed over the ranks, or maximised with the infinity norm. The table holds under both.
    """

    ANY = enum.auto()
    DIVIDED = enum.auto()
    DIFFERENT = enum.auto()


@dataclass(frozen=True)
class About:
    """Material for a message: the parameters' names, joined; this rank's own reasons; the parameters' dtypes."""

    names: str
    own: Sequence[str] = ()
    dtypes: str = ""


@dataclass(frozen=True)
class Alarm:
    """An alarm. ``codes``: their number, where it is DIFFERENT. ``error``: makes the error that every rank raises."""

    name: str
    combine: Combine
    error: Callable[[About], ZeroOptimError]
    codes: int = 0

    @property
    def columns(self) -> int:
        return {Combine.ANY: 1, Combine.DIVIDED: 2, Combine.DIFFERENT: self.codes}[self.combine]

    def entry(self, count: int) -> list[float]:
        """Make the columns of a rank's ``count``: of parameters, or the code of a DIFFERENT alarm."""
        if self.combine is Combine.ANY:
            return [float(count)]
        if self.combine is Combine.DIVIDED:
            return [float(count > 0), float(count == 0)]
        return [float(code == count) for code in range(self.codes)]

    def raised(self, columns: Sequence[float]) -> bool:
        """True if it is raised, by the ``columns`` that came back, on the host."""
        if self.combine is Combine.DIVIDED:
            return columns[0] > 0 and columns[1] > 0
        return sum(column > 0 for column in columns) >= (2 if self.combine is Combine.DIFFERENT else 1)

    def raised_on_device(self, columns: Tensor) -> Tensor:
        """[1] fp32: more than 0 where it is raised."""
        if self.combine is Combine.ANY:
            return columns
        if self.combine is Combine.DIVIDED:
            return columns[:1] * columns[1:]
        return ((columns > 0).sum() > 1).float().reshape(1)


def _late(about: About) -> ZeroOptimError:
    return GradientError(
        f"a gradient of {about.names} arrived after its bucket had been reduced: it became ready more often than in "
        "the backward that was observed. Nothing was updated. Call opt.zero_grad(), and opt.observe() before a "
        "backward that uses parameters another number of times"
    )


def _late_for_its_unit(about: About) -> ZeroOptimError:
    return GradientError(
        f"a gradient of {about.names} arrived after the backward of its unit. Nothing was updated. Gradients "
        "must come into a unit through what its forward returns: tensors in lists, tuples, dicts or dataclasses"
    )


def _refused(about: About) -> ZeroOptimError:
    other = f"the gradient of {about.names} on another rank cannot be used; expected a dense {about.dtypes}"
    return GradientError("; ".join(about.own or [other]))


def _thawed(about: About) -> ZeroOptimError:
    return RankMismatchError(
        f"{about.names} is frozen, with no gradient, on some ranks, and requires or has one on others: call "
        "requires_grad_() on every rank before the same step. Nothing was updated"
    )


def _leftover(about: About) -> ZeroOptimError:
    return GradientError(
        f"a gradient of {about.names} was assigned on some ranks, and not on others, after backward had reduced it: "
        "assign it on every rank, or before. Nothing was updated"
    )


def _edited(about: About) -> ZeroOptimError:
    return RankMismatchError(
        f"the gradients of {about.names} were dropped or written in place on some ranks, and not on others, between "
        "clip_grad_norm_ and the last step, which has updated them differently. Edit gradients on every rank alike. To "
        "go on, load a checkpoint. Nothing was updated now"
    )


def _offload(about: About) -> ZeroOptimError:
    other = f"another rank has lost the state of {about.names} to an I/O error: its own error has the cause"
    return OffloadError("; ".join(about.own or [f"{other}. Make a new optimizer and load a checkpoint"]))


def _parted(about: About) -> ZeroOptimError:
    return RankMismatchError(
        "the ranks have gathered units in different orders, and may have computed with wrong values: each must "
        "run as many forwards and backwards of the sharded model, in the same order. Nothing was updated"
    )


def alarms(*, by_units: bool) -> tuple[Alarm, ...]:
    """List the alarms of a step, the one that is raised first in front. ``by_units``: at stage 3."""
    parted = (Alarm("parted", Combine.DIFFERENT, _parted, ORDER_CODES),) if by_units else ()
    return (
        *parted,
        Alarm("late", Combine.ANY, _late_for_its_unit if by_units else _late),
        Alarm("offload", Combine.ANY, _offload),
        Alarm("refused", Combine.ANY, _refused),
        Alarm("thawed", Combine.DIVIDED, _thawed),
        Alarm("leftover", Combine.DIVIDED, _leftover),
        Alarm("edited", Combine.DIVIDED, _edited),
    )


class AlarmColumns:
    """The alarms' part of the exchange's vector.

    Args:
        columns: [width] fp32, a view of the vector.
    """

    def __init__(self, of: Sequence[Alarm], columns: Tensor) -> None:
        self._alarms = of
        self._views = columns.split([alarm.columns for alarm in of]) if of else ()
        quiet = [value for alarm in of for value in alarm.entry(0)]
        self._quiet = torch.tensor(quiet, dtype=torch.float32, device=columns.device)
        self._all = columns
        self._on_host = HostCopy(columns) if of else None

    def fill(self, counts: Mapping[str, int]) -> None:
        """Write this rank's columns. As a rule it has no alarm, and one copy does it."""
        self._all.copy_(self._quiet)
        for alarm, view in zip(self._alarms, self._views, strict=True):
            count = counts.get(alarm.name, 0)
            if count:
                entry, quiet = alarm.entry(count), alarm.entry(0)
                for place in (place for place in range(alarm.columns) if entry[place] != quiet[place]):
                    view[place].fill_(entry[place])

    def raised_on_device(self) -> Tensor:
        """[1] fp32: more than 0 where one is raised."""
        total = self._all.new_zeros(1)
        for alarm, view in zip(self._alarms, self._views, strict=True):
            total = total + alarm.raised_on_device(view)
        return total

    def send(self) -> None:
        """Send the columns to the host, which reads them when they have arrived."""
        if self._on_host is not None:
            self._on_host.send()

    @property
    def immediate(self) -> bool:
        """True if what is sent can be read at once, as on a CPU."""
        return self._on_host is not None and self._on_host.immediate

    def read_first_raised(self) -> Alarm | None:
        """Read the columns that were sent last, once, and pick the alarm; None also without any. The host waits."""
        values = self._on_host.read(wait=True) if self._on_host is not None else None
        return None if values is None else self.first_raised(values)

    def first_raised(self, values: Sequence[float]) -> Alarm | None:
        """Pick the alarm to raise, by the columns as the host has read them."""
        start = 0
        for alarm in self._alarms:
            if alarm.raised(values[start : start + alarm.columns]):
                return alarm
            start += alarm.columns
        return None


def width(of: Sequence[Alarm]) -> int:
    return sum(alarm.columns for alarm in of)
