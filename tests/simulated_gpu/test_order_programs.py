"""The order programs under both simulations: right numbers, no race, and one order of collectives on all ranks.

Those that reveal the seeded faults are here, and one of every other kind. ``make race-check`` runs all.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import run_ranks
from order_programs import ALL, STREAMS, WHAT, OrderProgram, all_programs, few_programs, wrong

from simulated_gpu.faults import FAULTS
from simulated_gpu.programs import train_all

REVEALING = list(dict.fromkeys(fault.programs[0] for fault in FAULTS if not fault.unseen))
KINDS_REVEALING = {program.what for program in REVEALING}
SAMPLE = [*REVEALING, *(program for program in few_programs(each=1) if program.what not in KINDS_REVEALING)]


def _check(programs: Sequence[OrderProgram], simulated: str, ranks: int = 2) -> None:
    found = wrong(run_ranks(ranks, train_all, programs, simulated=simulated), programs)
    assert not found, "\n".join(found)


def test_the_sample_has_every_kind() -> None:
    assert {program.what for program in SAMPLE} == set(WHAT)
    assert {program.stage for program in SAMPLE} == set(ALL)
    assert {(program.made_on, program.trained_on) for program in SAMPLE} == set(STREAMS)


@pytest.mark.parametrize("what", WHAT)
def test_with_streams(device: None, what: str) -> None:
    _check([program for program in SAMPLE if program.what == what], "streams:never")


@pytest.mark.parametrize("what", [what for what in WHAT if what.startswith("raised")])
def test_a_rank_alone_waits_for_what_a_raised_backward_has_left(device: None, what: str) -> None:
    """Autograd waits for its streams where a backward ends, and not where it raises. Two ranks wait for each other."""
    several = [program for program in all_programs() if program.made_on != program.trained_on]
    _check([program for program in several if program.what == what], "streams:never", ranks=1)


@pytest.mark.parametrize("what", WHAT)
def test_held_until_waited_for(what: str) -> None:
    _check([program.on_one_stream for program in few_programs(each=1) if program.what == what], "held")
