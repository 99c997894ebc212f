"""The whole public face as a family of programs: its words are in ``program``, and ``oracle`` says what they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from programs import run, world
from programs.family import Entries, Family, See
from simulated_gpu.switch import chosen

from fuzz import prelude
from fuzz.law import why_not
from fuzz.oracle import compare, expected, other_bits
from fuzz.program import Program, without_stores
from fuzz.script import stand_alone, text
from fuzz.shrink import candidates


class Face(Family):
    name = "fuzz"

    def one_order(self, program: Program) -> bool:
        return len(program.optims) == 1  # else ranks may come to them in any order

    def run(self, program: Program, rank: int, folder: str, see: See) -> None:
        names = {**vars(world), **vars(prelude)}
        if chosen():
            names["own_sum"] = _own_sum_alone

        def play(made: Program, of: str) -> None:
            def see_of(*seen: object) -> None:
                see(of, *seen)

            run.execute(text(made), "<program>", dict(names))["program"](rank, program.world, see_of)

        play(program, "")
        if (plain := without_stores(program)) != program:
            play(plain, "without stores")

    def verdict(self, program: Program, seen: Sequence[Entries]) -> str | None:
        have, plain = (
            [[entry[1:] for entry in of_rank if entry[0] == of] for of_rank in seen] for of in ("", "without stores")
        )
        return compare(program, expected(program), have) or (other_bits(program, plain, have) if any(plain) else None)

    def why_not(self, program: Program) -> str | None:
        return why_not(program)

    def smaller(self, program: Program) -> Iterator[Program]:
        return candidates(program)

    def script(self, program: Program, title: str) -> str:
        return stand_alone(program, title)


def _own_sum_alone(value: float, rank: int) -> float:
    """``own_sum`` without a message. On a GPU a collective of the program's must not come before what completes a
    backward that raised; random programs have it anywhere."""
    return sum(value * (other + 1) for other in range(dist.get_world_size()))


FACE = Face()


def check(program: Program) -> None:
    """Raises AssertionError where a program, alone, does other than it should."""
    run.check(FACE, program)
