"""State that this rank has lost to an I/O error of an offload store."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

from ..errors import OffloadError


class Holder(Protocol):
    """Has the state of some parameters, by index: a shard, or a batch of shards."""

    @property
    def parameters(self) -> list[int]: ...


class LostState:
    """The record of what this rank has lost. It is never cleared: only a new optimizer has whole state.

    Within a step other ranks wait for this one in a collective. So it records an error there instead of raising it, and
    all ranks raise in the next exchange, and in each one after it.

    Attributes:
        parameters: indices of the parameters whose state is lost.
        reasons: the errors, in words.
    """

    def __init__(self) -> None:
        self.parameters: set[int] = set()
        self.reasons: list[str] = []

    def record(self, parameters: Sequence[int], error: OffloadError) -> None:
        self.parameters |= set(parameters)
        if str(error) not in self.reasons:
            self.reasons.append(str(error))
            warnings.warn(f"{error}. The next step will raise, on every rank", stacklevel=2)

    def recording(self, of: Holder) -> _Recording:
        """Make a context that records an OffloadError within it as a loss of these parameters' state."""
        return _Recording(self, of)

    def check(self) -> None:
        """Raise OffloadError where state is lost."""
        if self.parameters:
            raise OffloadError("; ".join(self.reasons))


class _Recording:
    """See ``LostState.recording``. A class adds no frame between ``step`` and an update's kernel."""

    def __init__(self, lost: LostState, of: Holder) -> None:
        self._lost, self._of = lost, of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OffloadError):
            return False
        self._lost.record(self._of.parameters, error)
        return True
