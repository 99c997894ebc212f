"""The order programs under both simulations: right numbers, no race, and one order of collectives on all ranks.

Few of them are here. ``make race-check`` runs all.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from harness import run_ranks
from order_programs import WHAT, OrderProgram, Trained, check, few_programs, train

from simulated_gpu.build import Unavailable, library

STREAMS, HELD = "streams:never", "held:random"


def train_all(rank: int, world_size: int, programs: Sequence[OrderProgram]) -> list[Trained]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return [train(rank, world_size, program, device) for program in programs]


def _check(programs: Sequence[OrderProgram], simulated: str, ranks: int = 2) -> None:
    by_rank = run_ranks(ranks, train_all, programs, simulated=simulated)
    found = [check(results, program) for program, results in zip(programs, zip(*by_rank, strict=True), strict=True)]
    assert not any(found), "\n".join(filter(None, found))


@pytest.fixture(scope="module")
def device() -> None:
    try:
        library()
    except Unavailable as missing:
        pytest.skip(missing.reason)


@pytest.mark.parametrize("what", WHAT)
def test_with_streams(device: None, what: str) -> None:
    _check([program for program in few_programs() if program.what == what], STREAMS)


@pytest.mark.parametrize("what", WHAT)
def test_held_until_waited_for(what: str) -> None:
    programs = [program.on_one_stream for program in few_programs() if program.what == what]
    _check(list(dict.fromkeys(programs)), HELD)
