"""A fixed list of random programs: every store gives the bits of no store. ``python -m store_programs`` runs more."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path

import pytest
from programs.family import Failure
from programs.run import run_batch, seen_in_batch
from programs.shrink import shortest
from store_programs.generate import Program, generate
from store_programs.law import Stores, Verdict

STORES = Stores()
SEEDS = {1: range(0, 6), 2: (102, 103, 106, 108, 114, 117, 121, 122), 3: range(200, 202)}  # by ranks


def verdicts(programs: list[Program], folder: Path) -> list[Verdict]:
    """Of every program on rank 0; none may break the law on any rank."""
    seen = seen_in_batch(STORES, programs, str(folder))
    wrong = [f"{text}\n{p}" for p, of in zip(programs, seen, strict=True) if (text := STORES.verdict(p, of))]
    assert not wrong, "\n".join(wrong)
    return [entries[0][-1][0] for entries in seen]


@pytest.mark.parametrize("world", SEEDS)
def test_every_store_gives_the_bits_of_none(world: int, tmp_path: Path) -> None:
    judged = verdicts([generate(seed, world) for seed in SEEDS[world]], tmp_path)
    speculated = sum((verdict.speculated for verdict in judged), Counter())
    assert world != 2 or (speculated["right"] and speculated["redone"]), (
        "no program came to what speculation may get wrong"
    )


def program_of_another_eps() -> Program:
    """A program whose "store" is none, but an optimizer with another eps: it breaks the law."""
    program = generate(100, 2)
    broken = {"state_offload": None, "eps": 1e-2}
    ordinary = {"op": "train", "data": 1, "micros": [{}]}
    return copy.deepcopy(program) | {"runs": [[broken]], "ops": [ordinary, *program["ops"], ordinary]}


def test_another_result_is_told_on_every_rank() -> None:
    (failure,) = run_batch(STORES, [program_of_another_eps()])
    assert failure.kind == "differs parameter"
    assert "rank 0: run 0" in failure.message and "rank 1: run 0" in failure.message


def test_shrinking_keeps_what_fails() -> None:
    program = generate(3, 1) | {"ops": [{"op": "eval", "data": n} for n in range(9)]}

    def again_of(less: Program) -> Failure | None:
        return Failure(less, "", "") if any(op.get("data") == 5 for op in less["ops"]) else None

    small = shortest(Failure(program, "", ""), STORES.smaller, again_of, end=math.inf).program
    assert small["ops"] == [{"op": "eval", "data": 5}]
    assert set(small["config"]) == {"stage", "width", "dtypes", "lr"}
