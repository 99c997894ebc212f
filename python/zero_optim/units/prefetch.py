"""Gathers the next units of a cycle ahead, while the one before them computes."""

from __future__ import annotations

from collections.abc import Sequence

from .cycle import Cycle, Pass
from .unit import Unit, UnitState


class Prefetch:
    """Starts gathers ahead of the visits.

    Ranks need not start them at the same time: each unit is gathered in its turn in any case.

    Args:
        count: how many units are gathered ahead.
    """

    def __init__(self, cycle: Cycle, count: int) -> None:
        self._cycle, self.count = cycle, count
        self._reducing: set[object] = set()  # reducers with a reduction under way, which gathers would slow down

    @property
    def waits(self) -> bool:
        """True if the next units are gathered only when a reduction has arrived, or at the latest when one is visited.

        Under gloo gathers would slow the reduction down on the same threads, and take memory.
        """
        return bool(self._reducing)

    def reduction_begins(self, of: object) -> None:
        """Hold gathers back: the host is going to wait for a reduction (gloo)."""
        self._reducing.add(of)

    def reductions_arrived(self, of: object) -> None:
        """Gather ahead again, unless another reducer still has a reduction under way."""
        if of in self._reducing:
            self._reducing.remove(of)
            if not self._reducing and self._cycle.direction is Pass.BACKWARD:
                self.start_next()

    def forget(self, of: object) -> None:
        """Forget a reducer that was closed."""
        self._reducing.discard(of)

    def start_next(self) -> None:
        """Start to gather the next units of the cycle that is open, as far as their turn has come."""
        if self._cycle.direction is not None:
            self._start(self._cycle.ahead[: self.count])

    def start_rest_of_backward(self) -> None:
        """Start the gathers that are left of a backward that is open, as far as units are not gathered twice in it."""
        if self._cycle.direction is Pass.BACKWARD:
            self._start(self._cycle.ahead)

    def _start(self, units: Sequence[Unit]) -> None:
        earlier: set[Unit] = set()
        for unit in units:
            # A unit that is here, or has an earlier turn, may be resharded after that turn, and gathered again. So this
            # turn's gather cannot start yet, nor can those behind it: gathers keep their order.
            if unit.state is UnitState.UNSHARDED or unit in earlier:
                break
            unit.unshard()
            earlier.add(unit)
