"""What the engine asks of a family of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Entries = list[tuple[Any, ...]]  # what a rank saw, in order
See = Callable[..., None]


@dataclass(frozen=True)
class Failure:
    """``kind`` is what two failures share that are one: "differs", "raises" or "hangs", or words of the family's own.
    "in company": it fails only after other programs."""

    program: Any
    kind: str
    message: str


class Family:
    """Its programs are plain values whose ``repr`` makes them again. Instances travel by pickle.

    Attributes:
        name: of the command.
        seconds: what one program takes at most, among others and on a busy machine.
    """

    name: str
    seconds = 6.0

    def world(self, program: Any) -> int:
        return program.world

    def one_order(self, program: Any) -> bool:
        """Whether all ranks issue its collectives in one order, which a simulated GPU then checks."""
        return False

    def run(self, program: Any, rank: int, folder: str, see: See) -> None:
        """On every rank. ``see`` takes what ``verdict`` is to be told; that it is called shows that nothing hangs.
        ``folder`` is the same on every rank."""
        raise NotImplementedError

    def verdict(self, program: Any, seen: Sequence[Entries]) -> str | None:
        """What is wrong with what each rank saw; None: nothing."""
        raise NotImplementedError

    def kind(self, outcome: str, message: str) -> str:
        """Of a failure: ``outcome`` is "differs", "raises" or "hangs"."""
        return outcome

    def why_not(self, program: Any) -> str | None:
        """Why the law forbids a program; None: it does not."""
        return None

    def smaller(self, program: Any) -> Iterator[Any]:
        """Simpler programs, the much simpler first. They need not be legal."""
        raise NotImplementedError

    def script(self, program: Any, title: str) -> str:
        """What to read, or to paste, of a program that fails."""
        return repr(program)
