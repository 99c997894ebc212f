"""Backwards that raise, on one rank or on all, anywhere, and whatever a program does next, against torch's AdamW.

Each program trains a step, runs a backward that raises, does one more thing, and trains two steps more. The oracle adds
up what each rank's gradients were before the exception, as torch does.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from training_cases import Planned, impatient, raise_in_backward

SIZES = (700, 300, 500, 400, 600, 200)
CAP_MB = 0.002  # several buckets
LR = 0.01
RANKS = 2
ABSENT = None


def loss(params: Sequence[Tensor], factor: float, boom: int | None = None) -> Tensor:
    """The gradient of params[i] is ``factor * (i + 1)``; the last come first. ``boom``: after how many it raises."""
    total = torch.ones((), requires_grad=True)
    for index, parameter in enumerate(params):
        if boom is not None and len(params) - index == boom:
            total = raise_in_backward(total)
        total = total + (parameter * (factor * (index + 1))).sum()
    return raise_in_backward(total) if boom == 0 else total


@dataclass(frozen=True)
class Program:
    """``raising``: ranks; ``after``: how many gradients come before; ``then``: what follows."""

    stage: int
    optimizers: int
    raising: tuple[int, ...]
    after: int
    then: str


@dataclass
class Oracle:
    """All ranks in one process."""

    program: Program
    params: list[nn.Parameter]
    sums: list[dict[int, float]] = field(default_factory=lambda: [{} for _ in range(RANKS)])

    def backward(self, factors: Sequence[float], first: int = 0, only: Sequence[int] = range(RANKS)) -> None:
        for rank in only:
            start = first if rank in self.program.raising else 0
            for index in range(start, len(self.params)):
                self.sums[rank][index] = self.sums[rank].get(index, 0.0) + factors[rank] * (index + 1)

    def clear(self) -> None:
        self.sums = [{} for _ in range(RANKS)]

    def zero(self) -> None:
        for of_rank, index in itertools.product(self.sums, {i for of in self.sums for i in of}):
            of_rank[index] = 0.0

    def average(self, index: int) -> float | None:
        values = [of_rank.get(index) for of_rank in self.sums]
        return None if values == [ABSENT] * RANKS else sum(value or 0.0 for value in values) / RANKS

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for index, parameter in enumerate(self.params):
            average = self.average(index)
            parameter.grad = None if average is None else torch.full_like(parameter, average)
        optimizer.step()


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES]


def _optimizers(params: Sequence[nn.Parameter], program: Program) -> list[zero_optim.ShardedAdamW]:
    count = program.optimizers
    return [
        zero_optim.ShardedAdamW(params[number::count], lr=LR, stage=program.stage, bucket_cap_mb=CAP_MB)
        for number in range(count)
    ]


def _own_collective(rank: int) -> None:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    assert float(value) == sum(range(1, RANKS + 1))


def _play(rank: int, program: Program) -> float:
    """The largest difference from the oracle."""
    params, theirs = _parameters(), _parameters()
    opts, oracle = _optimizers(params, program), Oracle(program, theirs)
    adam = torch.optim.AdamW(theirs, lr=LR)

    def everywhere(call: Callable[[zero_optim.ShardedAdamW], object]) -> None:
        for opt in opts:
            call(opt)

    def clear() -> None:
        everywhere(lambda opt: opt.zero_grad())
        oracle.clear()

    def step() -> None:
        everywhere(lambda opt: opt.step())
        oracle.step(adam)

    def train(factors: Sequence[float]) -> None:
        loss(params, factors[rank]).backward()
        oracle.backward(factors)
        _own_collective(rank)

    train([1.0, 3.0])
    step()
    clear()
    with suppress(Planned):
        loss(params, [2.0, -1.0][rank], program.after if rank in program.raising else None).backward()
    oracle.backward([2.0, -1.0], first=len(params) - program.after)
    if program.stage > 0:  # there the other rank waits in backward, for averages
        _own_collective(rank)

    then = program.then
    if then == "zero_grad":
        clear()
    elif then == "zero":
        everywhere(lambda opt: opt.zero_grad(set_to_none=False))
        oracle.zero()
        step()
        clear()
    elif then == "module_zero_grad":
        for parameter in params:
            parameter.grad = None
        oracle.clear()
    elif then == "module_zero":
        for parameter in params:
            if parameter.grad is not None:
                parameter.grad.zero_()
        oracle.zero()
        step()
        clear()
    elif then == "step":
        step()
        clear()
    elif then == "backward":
        train([0.5, 0.25])
        step()
        clear()
    elif then == "no_sync":
        with ExitStack() as stack:
            for opt in opts:
                stack.enter_context(opt.no_sync())
            if rank == 1:
                loss(params, 0.5).backward()
        oracle.backward([0.0, 0.5], only=[1])
        step()
        clear()
    elif then == "clip":
        for number, opt in enumerate(opts):
            norm = float(opt.clip_grad_norm_(1e9))
            averages = {index: oracle.average(index) or 0.0 for index in range(number, len(params), len(opts))}
            expected = sum(SIZES[index] * average**2 for index, average in averages.items()) ** 0.5
            assert norm == pytest.approx(expected, rel=1e-5), f"the norm is {norm}, not {expected}"
        step()
        clear()
    elif then == "state_dict":
        everywhere(lambda opt: opt.load_state_dict(opt.state_dict()))
        clear()
    elif then == "full_state_dict":
        everywhere(zero_optim.full_state_dict)
        step()
        clear()
    elif then == "load_full_state_dict":
        everywhere(lambda opt: zero_optim.load_full_state_dict(opt, zero_optim.full_state_dict(opt) or None))
        step()
        clear()
    elif then == "observe":
        everywhere(lambda opt: opt.observe())
        step()
        clear()
    elif then == "close":
        everywhere(lambda opt: opt.close())
        for parameter in params:
            parameter.grad = None
        opts[:] = _optimizers(params, program)
        adam = torch.optim.AdamW(theirs, lr=LR)
        oracle.clear()
    for factors in ([1.5, 0.5], [-1.0, 2.0]):
        train(factors)
        step()
        clear()
    everywhere(lambda opt: opt.close())
    return max(float((a - b).abs().max()) for a, b in zip(params, theirs, strict=True))


def _play_all(rank: int, world_size: int, programs: Sequence[Program]) -> list[str]:
    wrong = []
    with warnings.catch_warnings(), impatient():
        warnings.simplefilter("ignore")
        for program in programs:
            difference = _play(rank, program)
            if not difference < 1e-5:
                wrong.append(f"{program}: off by {difference}")
    return wrong


FOLLOWED_BY = (
    "zero_grad",
    "zero",
    "module_zero_grad",
    "module_zero",
    "step",
    "backward",
    "no_sync",
    "clip",
    "state_dict",
    "full_state_dict",
    "load_full_state_dict",
    "observe",
    "close",
)


@pytest.mark.parametrize("raising", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("optimizers", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_some_gradients(stage: int, optimizers: int, raising: tuple[int, ...]):
    """Between gradients, of every optimizer; and after the last one."""
    afters = (len(SIZES) - 3 + optimizers - 1, len(SIZES))
    programs = [Program(stage, optimizers, raising, *how) for how in itertools.product(afters, FOLLOWED_BY)]
    assert run_ranks(RANKS, _play_all, programs, timeout=120) == [[]] * RANKS


@pytest.mark.parametrize("raising", [(0,), (0, 1)], ids=str)
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_before_the_first_gradient(stage: int, optimizers: int, raising: tuple[int, ...]):
    """On one rank alone it leaves no trace there: ``step``, or ``zero_grad`` after an earlier one, settles it."""
    followed_by: Sequence[str] = FOLLOWED_BY
    if len(raising) < RANKS:  # at stage 0 the other rank waits in backward, for the averages of each optimizer
        followed_by = ("step", "zero_grad") if stage > 0 else ("step",)[: 2 - optimizers]
    programs = [Program(stage, optimizers, raising, 0, then) for then in followed_by]
    assert run_ranks(RANKS, _play_all, programs, timeout=120) == [[]] * RANKS


def _parted(rank: int, world_size: int, stage: int, then: str) -> str:
    """A program that is wrong: the documentation asks for a zero_grad that is missing, or does not help at stage 0."""
    with impatient():
        try:
            _play(rank, Program(stage, 1, (0,), 0, then))
        except zero_optim.ZeroOptimError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("stage", "then"), [(0, "zero_grad"), (1, "backward"), (2, "backward"), (2, "module_zero_grad")]
)
def test_ranks_that_wait_for_each_other_in_vain_are_told_within_seconds(stage: int, then: str):
    """Long before the group's time-out, which would have other words. The ranks leave when it is over."""
    for text in run_ranks(RANKS, _parted, stage, then, timeout=60, collective_timeout=8):
        assert text.startswith("RankMismatchError: the ranks wait for each other"), text
        fewer = 1 if stage == 0 else 2  # since the optimizer was made
        assert f"rank 0 has reduced {fewer}, rank 1 has reduced {fewer + 1}" in text
        assert "opt.zero_grad()" in text
