"""The forwards that are under way, and what may follow them."""

from __future__ import annotations

import torch

from .unit import Unit


class Calls:
    """The calls of units that are under way, and what their modules have told of them.

    Attributes:
        running: the units whose forward is under way, the outermost first.
        trains: whether a backward may follow the forward cycle that is open, or was the last.
        by_part: whether that cycle was begun outside of a forward of the root.
    """

    def __init__(self) -> None:
        self.running: list[Unit] = []
        self.trains = False
        self.by_part = False
        self._roots = 0  # forwards of the root under way: a model may call itself
        self._root_trains = False  # whether the outermost of them began with gradients enabled

    @property
    def in_root(self) -> bool:
        """True if a forward of the root is under way."""
        return self._roots > 0

    def root_begins(self) -> bool:
        """Note that the root is called. Returns whether this is its outermost forward."""
        self._roots += 1
        if self._roots > 1:
            return False
        self._root_trains = torch.is_grad_enabled()
        return True

    def root_ended(self) -> None:
        # A forward that raised before the first hook of the root has begun nothing here, and ends all the same.
        self._roots = max(0, self._roots - 1)

    def cycle_begins(self) -> None:
        """Note that a forward cycle begins, with the call that is about to be noted."""
        self.by_part = not self.in_root
        # A re-entrant checkpoint within the root's forward disables gradients, and still is trained.
        self.trains = torch.is_grad_enabled() or (self.in_root and self._root_trains)

    def begin(self, unit: Unit) -> None:
        self.running.append(unit)
        unit.unwatch_parts()

    def end(self, unit: Unit) -> None:
        """End a call of ``unit``, which may never have begun: its first hook may have raised."""
        if unit in self.running:
            self.running.pop()
            if unit not in self.running:
                unit.watch_parts()

    def forget(self) -> None:
        """Forget the calls under way: they have raised, and no hook has told of their end."""
        self.running = []

    def is_called(self, unit: Unit) -> bool:
        """True if a forward of it is under way, or a call that stands in for one."""
        return unit in self.running

    def caller_of(self, unit: Unit) -> Unit | None:
        """Find the unit whose forward calls this one, though this one is not within it; None: there is none."""
        caller = self.running[-1] if self.running else unit
        return None if caller is unit or caller in unit.enclosing else caller
