"""A fixed list of random programs: every store gives the bits of no store. ``python -m store_programs`` runs more."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
from harness import run_ranks
from store_programs.generate import Program, generate
from store_programs.law import Verdict, judge_all
from store_programs.shrink import shrink

SEEDS = {1: range(0, 6), 2: (102, 103, 106, 108, 114, 117, 121, 122), 3: range(200, 202)}  # by ranks


def failures(programs: list[Program], by_rank: list[list[Verdict]]) -> list[str]:
    """What was found, each with the program; and a line where a failure has ended the list early."""
    found = [
        f"rank {rank}: {verdict.difference}\n{program}"
        for rank, verdicts in enumerate(by_rank)
        for program, verdict in zip(programs, verdicts, strict=False)
        if verdict.difference
    ]
    return found + [f"only {len(v)} programs ran" for v in by_rank if len(v) < len(programs)]


@pytest.mark.parametrize("world", SEEDS)
def test_every_store_gives_the_bits_of_none(world: int, tmp_path: Path) -> None:
    programs = [generate(seed, world) for seed in SEEDS[world]]
    by_rank = run_ranks(world, judge_all, programs, str(tmp_path), timeout=120)
    assert not failures(programs, by_rank)
    speculated = sum((verdict.speculated for verdict in by_rank[0]), Counter())
    assert world != 2 or (speculated["right"] and speculated["redone"]), (
        "no program came to what speculation may get wrong"
    )


def test_one_rank_in_fp32_is_torch_within_rounding(tmp_path: Path) -> None:
    programs = [generate(seed, 1, plain=True) for seed in range(15)]
    by_rank = run_ranks(1, judge_all, programs, str(tmp_path), True, timeout=60)
    assert not failures(programs, by_rank)
    assert not any(verdict.ended for verdict in by_rank[0])


def program_of_another_eps() -> Program:
    """A program whose "store" is none, but an optimizer with another eps: it breaks the law."""
    program = generate(100, 2)
    broken = {"state_offload": None, "eps": 1e-2}
    ordinary = {"op": "train", "data": 1, "micros": [{}]}
    return copy.deepcopy(program) | {"runs": [[broken]], "ops": [ordinary, *program["ops"], ordinary]}


def test_another_result_is_told_on_every_rank(tmp_path: Path) -> None:
    for (verdict,) in run_ranks(2, judge_all, [program_of_another_eps()], str(tmp_path)):
        assert "parameters" in verdict.difference


def test_shrinking_keeps_what_fails() -> None:
    program = generate(3, 1) | {"ops": [{"op": "eval", "data": n} for n in range(9)]}
    small = shrink(program, lambda p: any(op.get("data") == 5 for op in p["ops"]), seconds=5)
    assert small["ops"] == [{"op": "eval", "data": 5}]
