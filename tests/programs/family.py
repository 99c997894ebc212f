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

    def jobs(self, program: Any) -> Sequence[Any]:
        """What runs one after another, each on ranks of its own: such as a program that saves, and one that loads what
        the first has left in ``folder``. Of what follows, ``world`` to ``run`` are asked of a job."""
        return (program,)

    def world(self, program: Any) -> int:
        return program.world

    def one_order(self, program: Any) -> bool:
        """Whether all ranks issue its collectives in one order, which a simulated GPU then checks."""
        return False

    def run(self, program: Any, rank: int, folder: str, see: See) -> None:
        """On every rank. ``see`` takes what ``verdict`` is to be told; that it is called shows that nothing hangs.
        ``folder`` is one of the program's own, the same on every rank and for every job."""
        raise NotImplementedError

    def verdict(self, program: Any, seen: Sequence[Entries]) -> str | None:
        """What is wrong with what each rank saw, of each job; None: nothing."""
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
        """What to read, or to paste into a Python in ``tests/``, of a program that fails."""
        words, family = type(program).__module__, type(self)
        imports = f"from programs import run\nfrom {family.__module__} import {family.__name__}\nfrom {words} import *"
        return f"{imports}\n\nrun.check({family.__name__}(), {program!r})"
