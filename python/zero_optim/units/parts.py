"""Calls of parts of a unit: of an inner module, or of a method other than ``forward``.

Where no forward of the unit is under way, such a call stands in for one: the unit is gathered before it, and gradients
come back into the unit through what it returns. So a model runs whichever of its modules is called first: an embedding
alone, modules that a method calls, or one that has lost the sharded wrapper, as when ``peft`` merges adapters.

While a forward of its unit is under way a part is out of the way, so that the usual call of a model costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .hooks import AfterForward, BeforeForward, ForwardEnded
from .schedule import UnitSchedule, in_backward
from .stand_in import StandIn
from .unit import Unit, UnitState


class Part(StandIn):
    """Calls a module's method with the unit's parameters gathered.

    Args:
        module: of the unit.
        name: of the method.
    """

    def __init__(self, module: nn.Module, name: str, unit: Unit, units: Sequence[Unit], schedule: UnitSchedule) -> None:
        super().__init__(module, name)
        self._unit, self._schedule = unit, schedule
        part = not _has_all(module, units)  # a call of what has all units in it is a forward of the root
        self._others = [] if part else units[1:]
        self._before = BeforeForward(schedule, unit, part=part)
        self._ended = ForwardEnded(schedule, unit, part=part)
        self._after = AfterForward(schedule, unit, part=part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._must_gather():
            return self._method()(*args, **kwargs)
        try:
            self._before(self._module, args, kwargs)
            output = self._method()(*args, **kwargs)
        finally:
            self._ended()
        self._after(self._module, args, kwargs, output)
        return output

    def _must_gather(self) -> bool:
        unit = self._unit
        if self._schedule.calls.is_called(unit) or unit.state is UnitState.GATHERED:
            return False
        if self._others and all(other.state is UnitState.GATHERED for other in self._others):
            return False  # the modules of the root itself within it are parts of their own
        return not (in_backward() and unit.state is UnitState.UNSHARDED)  # a checkpoint within it computes again


def add_parts(units: Sequence[Unit], schedule: UnitSchedule) -> None:
    """Watch the modules that may be called first: those that register parameters, or have all units in them.

    Any other module calls one of these, or has no use for parameters.
    """
    for unit in units:
        holders = [place.module for place in unit.registrations]
        around = [module for module in unit.modules if unit is units[0] and _has_all(module, units)]
        for module in dict.fromkeys([*holders, *around]):
            if module is not unit.module:
                unit.add_part(Part(module, "forward", unit, units, schedule))


def _has_all(module: nn.Module, units: Sequence[Unit]) -> bool:
    within = set(module.modules())
    return units[0].module in within or (len(units) > 1 and all(unit.module in within for unit in units[1:]))
