"""Runs a program on ranks of the pool: in plain torch, and in every way in which it has to compute the same."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zero_optim
from compare import bits, first_difference, short
from harness import RankFailure, run_ranks
from torch import Tensor

from random_programs import plain
from random_programs.words import Words

SECONDS = 30.0  # of a program, on a busy machine
COLLECTIVE_SECONDS = 10.0


@dataclass(frozen=True)
class Program:
    """``text`` is run by ``world`` ranks, in the words of ``words.Words``."""

    world: int
    text: str

    def __repr__(self) -> str:
        return f'Program({self.world}, """\n{self.text}""")'


def execute(text: str, name: str, names: dict[str, Any]) -> dict[str, Any]:
    """The names of a program's text after it was run; tracebacks show its lines. ``name``: <like this>."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)
    return names


def play(
    program: Program, library: Any, rank: int, stored: bool = True, more: Mapping[str, Any] | None = None
) -> list[Any]:
    """What a rank sees. ``more``: other names that the text uses."""
    seen: list[Any] = []
    words = Words(library, rank, program.world, seen.append, stored)
    execute(program.text, f"<in {library.__name__}>", {**words.names(), **(more or {})})
    words.end()
    return seen


def differs(program: Program, want: Sequence[Any], have: Sequence[Any]) -> str | None:
    """Where a rank has first seen something else than in plain torch."""
    text = program.text
    relative = 2e-2 if any(word in text for word in ("float16", "int8", "muon")) else 2e-5
    absolute = 0.1 if "muon" in text else relative

    def of_leaves(want: Any, have: Any) -> str | None:
        if isinstance(want, str | int | None) and type(want) is type(have):
            return None if want == have else f"{short(have)} where {short(want)} is right"
        want, have = (
            np.asarray(v.float() if isinstance(v, Tensor) else v, np.float32).reshape(-1) for v in (want, have)
        )
        if want.shape != have.shape:
            return f"{have.size} values where {want.size} are right"
        finite = np.isfinite(want) & np.isfinite(have)
        with np.errstate(invalid="ignore"):
            off = (np.isfinite(want) != np.isfinite(have)) | (
                finite & (np.abs(want - have) > absolute + relative * np.abs(want))
            )
        if not off.any():
            return None
        first = int(np.flatnonzero(off)[0])
        return f"{int(off.sum())} of {off.size} values, from [{first}]: {have[first]} where {want[first]} is right"

    return first_difference([*want], [*have], of_leaves)


def verdict(program: Program, rank: int, more: Mapping[str, Any] | None = None) -> str | None:
    """What is wrong with what this rank sees; None: nothing. ``more``: other names that the text uses."""
    ours = play(program, zero_optim, rank, more=more)
    if found := differs(program, play(program, plain, rank, more=more), ours):
        return f"rank {rank}, what it saw: {found}"
    if "store=" in program.text or "param_offload=" in program.text:
        without = play(program, zero_optim, rank, stored=False)
        if found := first_difference(without, ours, bits):
            return f"rank {rank}, what it saw without a store: {found}"
    return None


def _verdicts(rank: int, world: int, programs: Sequence[Program], judge: Callable[..., Any]) -> list[str | None]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return [judge(program, rank) for program in programs]


def check(*programs: Program, judge: Callable[[Program, int], str | None] = verdict) -> None:
    """Raise AssertionError where a program, of the same number of ranks each, does other than it should."""
    seconds = SECONDS * (1 + len(programs) / 10)
    try:
        by_rank = run_ranks(
            programs[0].world,
            _verdicts,
            programs,
            judge,
            timeout=seconds,
            collective_timeout=COLLECTIVE_SECONDS,
            one_order=False,
        )
    except RankFailure as failure:
        if len(programs) == 1:
            raise AssertionError(f"{failure}\n{programs[0]!r}") from None
        for program in programs:  # alone, to find the one
            check(program, judge=judge)
        raise AssertionError(f"they fail in company alone: {failure}\n{programs!r}") from None
    for program, found in zip(programs, zip(*by_rank, strict=True), strict=True):
        texts = [text for text in found if text]
        assert not texts, "\n".join([*texts, repr(program)])
