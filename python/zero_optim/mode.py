"""The mode of an optimizer: whether its memory is on the device, and what its parameters are."""

from __future__ import annotations

import enum

from .errors import ZeroOptimError

ASLEEP = "the optimizer is asleep: call opt.wake()"


class Mode(enum.Enum):
    """Mode of an optimizer.

    ================  ==========  ==========  ==========
    event             OWN         AVERAGE     ASLEEP
    ================  ==========  ==========  ==========
    swap_to_ema       AVERAGE     raises      raises
    its end           --          OWN         --
    sleep             ASLEEP      raises      raises
    wake              OWN         AVERAGE     OWN
    step              OWN         raises      raises
    a save            OWN         raises      raises
    backward          OWN         AVERAGE     raises
    ================  ==========  ==========  ==========

    - *wake* of an optimizer that is awake changes nothing: a loop may call it before every phase that trains.
    - A *sleep* or *wake* that fails on one rank is raised on all, and changes the mode of none.
    """

    OWN = enum.auto()  # the parameters are what was trained; everything is where it is used
    AVERAGE = enum.auto()  # within swap_to_ema(): the parameters are their average
    ASLEEP = enum.auto()  # the optimizer's memory is off the device


class CurrentMode:
    """The mode of one optimizer, which all its parts read."""

    def __init__(self) -> None:
        self.now = Mode.OWN

    def check_awake(self, what: str | None = None) -> None:
        """Raise ZeroOptimError in ASLEEP. ``what`` was called, for the message."""
        if self.now is Mode.ASLEEP:
            raise ZeroOptimError(ASLEEP if what is None else f"{what}: {ASLEEP}")

    def check(self, what: str) -> None:
        """Raise ZeroOptimError unless the mode is OWN. ``what`` was called, for the message."""
        self.check_awake(what)
        if self.now is Mode.AVERAGE:
            raise ZeroOptimError(f"{what} was called within swap_to_ema(), where the parameters are their average")
