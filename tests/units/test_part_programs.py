"""Random programs that call models, parts of them and methods; ``part_programs`` has their words and their law."""

from __future__ import annotations

import dataclasses
import re
from itertools import islice

import pytest
from part_programs.execute import PARTS, why_not
from part_programs.generate import program
from programs.run import run_alone, run_batch
from programs.search import report
from programs.shrink import shrink

SEEDS = 50  # ``python -m part_programs`` runs more
WITHOUT = (
    r"ckpt=True|, True\)|"  # re-entrant checkpoints change how often a gradient comes: docs/step.md, ``opt.observe()``
    r"(?s:inner=(Block|Lin).*\.far =|\.far =.*inner=(Block|Lin))"  # docs/zero3.md, limits: a unit that calls another
)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_programs_compute_what_plain_modules_do(world):
    drawn = (p for p in map(program, range(SEEDS)) if p.world == world and not re.search(WITHOUT, str(p)))
    programs = [p for p in drawn if why_not(p) is None]
    assert len(programs) > 2
    for failure in islice(run_batch(PARTS, programs), 1):
        pytest.fail(report(PARTS, shrink(PARTS, failure, seconds=60), f"seed {failure.program.seed}"))


def test_a_program_that_is_wrong_is_found():
    """One rank's output is read where the docs say that it raises: the runner has to say so, at stage 3 alone."""
    wrong = dataclasses.replace(program(3), ops=(("see(next(m.parameters()).sum())",),))
    assert why_not(wrong) is None
    found = run_alone(PARTS, wrong)
    assert found is not None and found.kind == "raises at stage 3"
    assert "ShardAccessError" in found.message
