"""Random programs that call models, parts of them and methods; ``part_programs`` draws, runs and shrinks them."""

from __future__ import annotations

import dataclasses
import re

import pytest
from part_programs import alone, judge, legal, program, shrink

SEEDS = 50  # ``python tests/part_programs.py 0 5000`` runs many
WITHOUT = (
    r"ckpt=True|, True\)|"  # re-entrant checkpoints change how often a gradient comes: docs/step.md, ``opt.observe()``
    r"(?s:inner=(Block|Lin).*\.far =|\.far =.*inner=(Block|Lin))"  # docs/zero3.md, limits: a unit that calls another
)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_programs_compute_what_plain_modules_do(world):
    drawn = (p for p in map(program, range(SEEDS)) if p.world == world and not re.search(WITHOUT, str(p)))
    programs = [p for p in drawn if legal(p) is None]
    assert len(programs) > 2
    failures = [shrink(failed, found, seconds=60) for failed, found in judge(programs)[:1]]
    assert not failures, "\n".join(f"{found}\n{failed}" for failed, found in failures)


def test_a_program_that_is_wrong_is_found():
    """One rank's output is read where the docs say that it raises: the runner has to say so, at stage 3 alone."""
    wrong = dataclasses.replace(program(3), ops=(("see(next(m.parameters()).sum())",),))
    assert legal(wrong) is None
    found = alone(wrong)
    assert found is not None and found.startswith("raises-at-3")
