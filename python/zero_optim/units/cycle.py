"""A cycle goes once through all units, in an order that all ranks have; and this rank's position in it."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence

from .unit import Unit

ORDER_CODES = 64
"""How many values a digest of cycles can have, as ranks compare theirs in ``step``."""


class Pass(enum.Enum):
    FORWARD = 1
    BACKWARD = 2


class Cycle:
    """The cycle that is open, or none.

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

    def end(self) -> None:
        self.direction = None

    @property
    def ahead(self) -> Sequence[Unit]:
        """The units that are still to be visited, the next one first."""
        return self.order[self.position + 1 :]

    def positions_to(self, unit: Unit) -> range:
        """The positions that a visit of ``unit``, which is ahead, goes through; its own is the last."""
        return range(self.position + 1, self.order.index(unit, self.position + 1) + 1)

    def opened_before(self, unit: Unit) -> list[Unit]:
        """The open units at positions before that of ``unit``, which is open."""
        return [other for other, position in self.open.items() if position < self.open[unit]]

    @property
    def code(self) -> int:
        """A digest of the cycles so far: the same on ranks that went through the same; else, as a rule, another."""
        return self._digest % ORDER_CODES
