"""Counts what forwards announce to backward: the cycles that it may take, and reductions.

A backward cycle is *due* for a forward cycle that other ranks may come back through:

======================  ================
due                     becomes
======================  ================
FORWARD ends, trains    one more
FORWARD ends            the same
BACKWARD ends           one less, or 0
complete_all_backwards  0
end_step                0
======================  ================

``complete_all_backwards`` ends the cycle that is open, and goes through what is due, one cycle for each.

For each optimizer, whether a forward has *announced* a reduction. The backward may not have come to it on this rank:

====================  ================
announced             becomes
====================  ================
FORWARD ends, trains  yes
FORWARD ends          the same
excuse                no
====================  ================

- *excuse*: the optimizer has stepped, or zeroed, or a ``no_sync`` block has ended. All ranks know of it.

Whether backward takes as many cycles as were counted depends on the *course* of the forward cycles:

====================  ============  ============  ============  ============
course                NONE          ROOT          PART          TANGLED
====================  ============  ============  ============  ============
FORWARD begins, root  ROOT          ROOT          TANGLED       TANGLED
FORWARD begins, part  PART          TANGLED       TANGLED       TANGLED
a unit calls another  TANGLED       TANGLED       TANGLED       TANGLED
none is due           NONE          NONE          NONE          NONE
====================  ============  ============  ============  ============
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from .order import Known


class Course(enum.Enum):
    """The course of the forward cycles: it tells whether a backward that comes back takes as many."""

    NONE = enum.auto()
    ROOT = enum.auto()  # each within a forward of the root
    PART = enum.auto()  # one, of parts or units that were called by themselves
    TANGLED = enum.auto()  # that cannot be told


class BackwardsDue:
    """The backward cycles that are due, and the reductions that are announced.

    Attributes:
        count: forward cycles that a backward may still come back through.
        course: of the forward cycles since none was due.
    """

    def __init__(self) -> None:
        self.count = 0
        self.course = Course.NONE
        self._announced: set[object] = set()  # to whom a forward has announced a reduction

    def forward_begins(self, by: Course) -> None:
        """Note that a forward cycle begins, ``by`` the ROOT or a PART."""
        again = self.course is by is Course.ROOT
        self.course = by if self.course is Course.NONE or again else Course.TANGLED

    def unit_calls_another(self) -> None:
        self.course = Course.TANGLED

    def forward_ended(self, listeners: Iterable[object]) -> None:
        """Make one more backward due, and announce reductions: a forward cycle that trains is through."""
        self.count += 1
        self._announced.update(listeners)

    def backward_ended(self) -> None:
        self.count -= 1
        if self.count <= 0:  # a re-entrant checkpoint makes none due, and takes a cycle all the same
            self.none_is_due()

    def none_is_due(self) -> None:
        self.count, self.course = 0, Course.NONE

    def is_last(self, known: Known) -> bool:
        """True if the backward cycle that is open is known to be the last before backward ends.

        With two forwards before one backward, the first cycle back is not the last. The second brings more gradients to
        the same parameters: a bucket that was launched by then would miss them. How many come is not known

        - of a graph that is gone through again;
        - where parts were called in several cycles: a re-entrant checkpoint makes none due;
        - where a unit has called another: backward comes back to the first;
        - where the order of the forward alone is known: a unit that is in it twice takes two cycles back.
        """
        return self.count == 1 and self.course is not Course.TANGLED and known is not Known.FORWARD

    def is_announced(self, to: object) -> bool:
        return to in self._announced

    def excuse(self, listener: object) -> None:
        """Take back the reductions that the forwards so far have announced to ``listener``."""
        self._announced.discard(listener)
