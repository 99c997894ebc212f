"""Rounds: which reductions this rank owes the others.

A *round* is one synchronised backward's reductions: every bucket once, by ascending index. Between two calls that all
ranks make, they must launch equally many rounds. To ask each other how many would cost one more message a step. So each
rank derives the count from the calls that all ranks make. One state is enough to remember them.

============  ====  ==============================================================================
state         owed  meaning
============  ====  ==============================================================================
UNREDUCED     1     no round since the last ``step`` or ``zero_grad``
COMPLETE      0     every gradient was in a round
DIRTY         1     a round, and after it gradients that stayed on their rank
OPEN          1     a round was begun: its backward runs, or has raised
COMPLETING    1     the rest of the round is being launched, as its backward is over or is joined
============  ====  ==============================================================================

*Owed* is the number of rounds that ``step`` has to launch. In UNREDUCED a rank owes one, whether it had a backward
under ``no_sync`` or none at all. So a rank without data takes part by calling ``step``.

============  ============  ============  ============  ============  ===========
event         UNREDUCED     COMPLETE      DIRTY         OPEN          COMPLETING
============  ============  ============  ============  ============  ===========
begin         OPEN          OPEN          OPEN          error         error
complete      error         error         error         COMPLETING    COMPLETING
completed     error         error         error         error         COMPLETE
local         UNREDUCED     DIRTY         DIRTY         OPEN          COMPLETING
step          UNREDUCED     UNREDUCED     UNREDUCED     error         error
clear         UNREDUCED     UNREDUCED     UNREDUCED     error         error
============  ============  ============  ============  ============  ===========

- *begin*: a synchronised backward begins; or a whole round does, outside of any backward. What is open was cut short by
  an exception, and is completed before.
- *complete*: what is left of the round leaves now.
- *completed*: the last bucket has left.
- *local*: a ``no_sync`` block has ended, or a backward that reduces nothing. Whether this rank had a gradient in it
  does not matter: the others count the block, too. A round is open then only where an error has ended the block.
  At stage 3 a closure that begins after a round is *local*, too: its backward may reach only other ranks.
- *step*: the gradients were applied. *clear*: ``zero_grad`` has dropped them.

A backward that raises is no event. It leaves its round OPEN, and whatever comes next completes it first::

    rank 0   backward raises half-way   OPEN       zero_grad: launch what is left, then clear
    rank 1   backward                   COMPLETE   zero_grad: clear
"""

from __future__ import annotations

import enum


class RoundState(enum.Enum):
    """The debt of a rank. The value has its name in messages, and the number of rounds that are owed."""

    UNREDUCED = "unreduced", 1
    COMPLETE = "complete", 0
    DIRTY = "dirty", 1
    OPEN = "open", 1
    COMPLETING = "not complete", 1

    @property
    def owed(self) -> int:
        return self.value[1]


_OPEN = (RoundState.OPEN, RoundState.COMPLETING)


class Rounds:
    """The state, and how many rounds were completed.

    Attributes:
        state: says what is owed.
        launched: rounds since the last ``step`` or ``zero_grad``.
        zeroed: whether ``zero_grad`` was called since the last ``step``.
        applied: whether nothing was accumulated since the last ``step`` or ``zero_grad``: any gradient there is old.
    """

    def __init__(self) -> None:
        self.state = RoundState.UNREDUCED
        self.launched = 0
        self.zeroed = False
        self.applied = True

    @property
    def open(self) -> bool:
        return self.state in _OPEN

    def begin(self) -> None:
        self._refuse_open("begin")
        self.state, self.applied = RoundState.OPEN, False

    def complete(self) -> None:
        if not self.open:
            raise RuntimeError(f"complete: a round is {self.state.value[0]}, and none was begun")
        self.state = RoundState.COMPLETING

    def completed(self) -> None:
        if self.state is not RoundState.COMPLETING:
            raise RuntimeError(f"completed: a round is {self.state.value[0]}, and its rest has not left")
        self.launched += 1
        self.state = RoundState.COMPLETE

    def local(self) -> None:
        self.applied = False
        if self.state is RoundState.COMPLETE:
            self.state = RoundState.DIRTY

    def step(self) -> None:
        self._refuse_open("step")
        self.clear()
        self.zeroed = False

    def clear(self) -> None:
        self._refuse_open("clear")
        self.state = RoundState.UNREDUCED
        self.launched, self.zeroed, self.applied = 0, True, True

    def _refuse_open(self, event: str) -> None:
        if self.open:
            raise RuntimeError(f"a round is {self.state.value[0]}: complete it before {event}")
