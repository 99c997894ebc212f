"""What a schedule keeps track of: the open cycle, the running forwards, and the backwards that may follow."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence

import torch

from .order import Known
from .unit import Unit, UnitState

ORDER_CODES = 64
"""How many values a digest of cycles can have, as ranks compare theirs in ``step``."""


class Pass(enum.Enum):
    FORWARD = 1
    BACKWARD = 2


class Cycle:
    """The cycle that is open, or none: it goes once through all units, in an order that all ranks have agreed on.

    Attributes:
        direction: of the cycle that is open; None: none is.
        order: its units; one that is called several times is in it as often.
        position: of the unit that was visited last; -1: none was.
        open: the units that were visited in it and are not over, each with its position.
    """

    def __init__(self) -> None:
        self.direction: Pass | None = None
        self.order: Sequence[Unit] = ()
        self.position = -1
        self.open: dict[Unit, int] = {}
        self._digest = 0

    def begin(self, direction: Pass, order: Sequence[Unit]) -> None:
        self.direction, self.order, self.position = direction, order, -1
        self._digest = zlib.crc32(bytes([direction.value]), self._digest)

    @property
    def ahead(self) -> Sequence[Unit]:
        return self.order[self.position + 1 :]

    @property
    def code(self) -> int:
        """A digest of the cycles so far, which ranks compare."""
        return self._digest % ORDER_CODES


class Prefetch:
    """Starts gathers ahead of the visits. Each unit is gathered in its turn in any case, so ranks may start them at
    different times.

    Attributes:
        count: how many units are gathered ahead.
        reducing: reducers with a reduction in flight, under gloo. Gathers wait until it has arrived, or at the latest
            until the unit is visited: on the same threads they would slow it down, and take memory.
    """

    def __init__(self, cycle: Cycle, count: int) -> None:
        self._cycle, self.count = cycle, count
        self.reducing: set[object] = set()

    def reduction_begins(self, of: object) -> None:
        self.reducing.add(of)

    def reductions_arrived(self, of: object) -> None:
        """Gather ahead again, unless another reducer still has a reduction in flight."""
        if of in self.reducing:
            self.reducing.remove(of)
            if not self.reducing and self._cycle.direction is Pass.BACKWARD:
                self.start_next()

    def start_next(self) -> None:
        if self._cycle.direction is not None:
            self.start(self._cycle.ahead[: self.count])

    def start(self, units: Sequence[Unit]) -> None:
        """Start to gather these units, which are ahead, as far as their turn has come."""
        earlier: set[Unit] = set()
        for unit in units:
            # A unit that is here, or has an earlier turn, may be resharded after that turn, and gathered again. So this
            # turn's gather cannot start yet, nor can those behind it: gathers keep their order.
            if unit.state is UnitState.UNSHARDED or unit in earlier:
                break
            unit.unshard()
            earlier.add(unit)


class Calls:
    """The forwards that run.

    Attributes:
        running: the units whose forward runs, the outermost first.
        trains: whether a backward may follow the forward cycle that is open, or was the last.
        by_part: whether that cycle was begun outside of a forward of the root.
    """

    def __init__(self) -> None:
        self.running: list[Unit] = []
        self.trains = False
        self.by_part = False
        self._roots = 0  # running forwards of the root: a model may call itself
        self._root_trains = False  # whether the outermost of them began with gradients enabled

    @property
    def in_root(self) -> bool:
        """True if a forward of the root runs."""
        return self._roots > 0

    def root_begins(self) -> bool:
        """Returns whether this is the root's outermost forward."""
        self._roots += 1
        if self._roots == 1:
            self._root_trains = torch.is_grad_enabled()
        return self._roots == 1

    def cycle_begins(self) -> None:
        self.by_part = not self.in_root
        # A re-entrant checkpoint within the root's forward disables gradients, and a backward follows all the same.
        self.trains = torch.is_grad_enabled() or (self.in_root and self._root_trains)

    def begin(self, unit: Unit) -> None:
        self.running.append(unit)
        unit.unwatch_parts()

    def end(self, unit: Unit, *, is_root: bool) -> None:
        """End a call of ``unit``, which may never have begun: its first hook may have raised."""
        if is_root:
            self._roots = max(0, self._roots - 1)
        if unit in self.running:
            self.running.pop()
            if unit not in self.running:
                unit.watch_parts()

    def caller_of(self, unit: Unit) -> Unit | None:
        """Find the unit whose forward calls this one, though this one is not within it; None: there is none."""
        caller = self.running[-1] if self.running else unit
        return None if caller is unit or caller in unit.enclosing else caller


class BackwardsDue:
    """The backward cycles that may still come.

    Attributes:
        count: forward cycles that a backward may still come back through.
        nested: whether a unit has called another, which is not within it, since none was due.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nested = False
        self._begun = 0  # forward cycles since none was due
        self._by_part = False  # whether one of them was begun outside of a forward of the root

    def forward_begins(self, *, by_part: bool) -> None:
        self._begun += 1
        self._by_part |= by_part

    def reset(self) -> None:
        """Let no backward be due: the gradients were applied."""
        self.count = self._begun = 0
        self.nested = self._by_part = False

    def is_last(self, known: Known) -> bool:
        """True if the backward cycle that is open is known to be the last before backward ends.

        With two forwards before one backward, the first cycle back is not the last. The second brings more gradients to
        the same parameters: a bucket that was launched by then would miss them. How many come is unknown

        - of a graph that is gone through again;
        - where parts were called in several cycles: a re-entrant checkpoint makes none due;
        - where a unit has called another: backward comes back to the first;
        - where the order of the forward alone is known: a unit that is in it twice takes two cycles back.
        """
        countable = not self.nested and not (self._by_part and self._begun > 1) and known is not Known.FORWARD
        return self.count == 1 and countable
