"""The order programs under both simulations: right numbers, no race, and one order of collectives on all ranks.

Those that reveal the seeded faults are here, and one of every other kind. In ``make test`` these others run in one
simulation of the two. ``make race-check`` runs all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from cells import slow
from harness import run_ranks
from order_programs import ALL, STREAMS, WHAT, OrderProgram, Trained, all_programs, few_programs, wrong

from simulated_gpu.faults import FAULTS
from simulated_gpu.programs import train_all

REVEALING = list(dict.fromkeys(fault.programs[0] for fault in FAULTS if not fault.unseen))
KINDS_REVEALING = {program.what for program in REVEALING}
OF_EVERY_KIND = few_programs(each=1)
OTHERS = [program for program in OF_EVERY_KIND if program.what not in KINDS_REVEALING]
SAMPLE = [*REVEALING, *OTHERS]
AT_ONCE = 8  # a call of ranks takes as long as a program


def _in_calls(programs: Sequence[OrderProgram], marks: Any = ()) -> list[Any]:
    """For ``parametrize``: so many in a call."""
    calls = [programs[i : i + AT_ONCE] for i in range(0, len(programs), AT_ONCE)]
    return [pytest.param(call, id=f"from {call[0].what} to {call[-1].what}", marks=marks) for call in calls]


def _train(rank: int, world_size: int, programs: Sequence[OrderProgram]) -> list[Trained]:
    """Of what raises, which program it is."""
    trained = []
    for program in programs:
        try:
            trained += train_all(rank, world_size, [program])
        except Exception as error:
            raise RuntimeError(f"{program}") from error
    return trained


def _check(programs: Sequence[OrderProgram], simulated: str, ranks: int = 2) -> None:
    found = wrong(run_ranks(ranks, _train, programs, simulated=simulated), programs)
    assert not found, "\n".join(found)


def test_the_sample_has_every_kind() -> None:
    assert {program.what for program in SAMPLE} == set(WHAT)
    assert {program.stage for program in SAMPLE} == set(ALL)
    assert {(program.made_on, program.trained_on) for program in SAMPLE} == set(STREAMS)


@pytest.mark.parametrize("programs", [*_in_calls(REVEALING), *_in_calls(OTHERS, slow)])
def test_with_streams(device: None, programs: Sequence[OrderProgram]) -> None:
    _check(programs, "streams:never")


@pytest.mark.parametrize("what", [what for what in WHAT if what.startswith("raised")])
def test_a_rank_alone_waits_for_what_a_raised_backward_has_left(device: None, what: str) -> None:
    """Autograd waits for its streams where a backward ends, and not where it raises. Two ranks wait for each other."""
    several = [program for program in all_programs() if program.made_on != program.trained_on]
    _check([program for program in several if program.what == what], "streams:never", ranks=1)


# Of the kinds that reveal faults those whose faults name this simulation stay; ``test_with_streams`` has the others.
HELD = {fault.programs[0].what for fault in FAULTS if fault.simulation == "held"} | {one.what for one in OTHERS}
STAY = [program.on_one_stream for program in OF_EVERY_KIND if program.what in HELD]
SLOW = [program.on_one_stream for program in OF_EVERY_KIND if program.what not in HELD]


@pytest.mark.parametrize("programs", [*_in_calls(STAY), *_in_calls(SLOW, slow)])
def test_held_until_waited_for(programs: Sequence[OrderProgram]) -> None:
    _check(programs, "held")
