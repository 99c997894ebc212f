"""Trouble with state off the device: what has happened, to which parameters, and whether all ranks were told.

==========  =========  =========  =====
event       WHOLE      UNWRITTEN  LOST
==========  =========  =========  =====
unwritten   UNWRITTEN  UNWRITTEN  LOST
lose        LOST       LOST       LOST
told        WHOLE      WHOLE      LOST
==========  =========  =========  =====

- UNWRITTEN: a page could not be written. It is in host memory, and nothing is lost. All ranks raise once.
- LOST: a page could not be read. All ranks raise at every step, and at all else in which they read state together.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable
from typing import Protocol

from ..errors import OffloadError


class Condition(enum.Enum):
    """Condition of a rank's state."""

    WHOLE = enum.auto()
    UNWRITTEN = enum.auto()
    LOST = enum.auto()


class Holder(Protocol):
    """Has the state of some parameters, by index: a shard, or a batch of shards."""

    @property
    def parameters(self) -> list[int]: ...


class Losing:
    """See ``Trouble.losing``. A class of its own adds no frame between ``step`` and an update's kernel."""

    def __init__(self, trouble: Trouble, of: Holder) -> None:
        self._trouble, self._of = trouble, of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OffloadError):
            return False
        self._trouble.lose(self._of.parameters, error)
        return True


class Trouble:
    """The record of trouble on one rank.

    Attributes:
        parameters: indices of the parameters concerned.
        reasons: in words.
    """

    def __init__(self) -> None:
        self.condition = Condition.WHOLE
        self.parameters: set[int] = set()
        self.reasons: list[str] = []

    def unwritten(self, parameters: Iterable[int], error: OffloadError) -> None:
        if self.condition is not Condition.LOST:
            self.condition = Condition.UNWRITTEN
            self._note(parameters, f"{error}. Save a checkpoint: state is whole")

    def lose(self, parameters: Iterable[int], error: OffloadError) -> None:
        """Note that state is lost. In the middle of a step other ranks wait for this one, so it goes on, and all raise
        in the next step."""
        if self.condition is not Condition.LOST:
            self.told()
        self.condition = Condition.LOST
        why = f"{error}. It may have been found within a step, which has updated the other parameters"
        if why not in self.reasons:
            warnings.warn(f"{error}. The next step will raise, on every rank", stacklevel=2)
        self._note(parameters, why)

    def _note(self, parameters: Iterable[int], why: str) -> None:
        self.parameters |= set(parameters)
        if why not in self.reasons:
            self.reasons.append(why)

    def losing(self, of: Holder) -> Losing:
        """Note an OffloadError within as a loss of these parameters' state, instead of raising it."""
        return Losing(self, of)

    def told(self) -> None:
        """Note that every rank has raised."""
        if self.condition is not Condition.LOST:
            self.condition = Condition.WHOLE
            self.parameters, self.reasons = set(), []

    def error(self) -> OffloadError:
        return OffloadError("; ".join(self.reasons))
