"""A GPT's training step on several ranks: every stage of ``ShardedAdamW`` against its peers, by time and by memory.

First each contender trains alone in fresh processes, where its memory is measured; one that fails is left out, with its
error. Then all train side by side in the same processes, a step of each in turn.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import torch

from ..comm.collectives import make_comm
from ..errors import ZeroOptimError
from ..train.model import GPT, ModelConfig
from . import peak_memory
from .contenders import DDP, DDP_AUTOCAST, FORMS, MAKERS, OURS, PACKAGES, Contender, Task, keeps, model_config
from .contest import Say, TogetherClock, each_alone, in_all, slower
from .ranks import RanksError, on_ranks
from .rows.op import Row
from .timing import Clock, Spread, TimedRounds, interleaved, make_clock
from .traffic import CountedTraffic

RANKS = 2
SEQ = {"cpu": 64, "cuda": 1024}  # tokens of a window
TOKENS = {"cpu": (256, 512), "cuda": (4096,)}  # of a rank in a step
ROUNDS = 21
WARM_UP_STEPS, STEADY_STEPS = 2, 3  # buckets are laid out in the order of the first step
TINY = ModelConfig(layers=1, hidden=64, heads=2, seq=16)
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-4}  # of the loss: contenders round at different places
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Alone:
    """A contender that trained alone.

    Attributes:
        steady: peak bytes in steps after the first few, less those before the model was made, of the rank that needs
            most; None where memory cannot be measured.
        start: the same from the model's construction on.
        losses: mean over the ranks, of each step.
        rest: bytes between two steps, gradients zeroed.
        communicated: bytes a step, as ``Traffic`` counts them.
    """

    steady: int | None
    start: int | None
    losses: tuple[float, ...]
    rest: int | None = None
    communicated: int | None = None

    @property
    def memory(self) -> dict[str, int] | None:
        shown = {"steady": self.steady, "start": self.start, "rest": self.rest}
        return {name: nbytes for name, nbytes in shown.items() if nbytes is not None} or None


@dataclass(frozen=True)
class Contest:
    """The contenders ``names`` that train ``task`` side by side on ``ranks`` ranks.

    Attributes:
        reference: the contender whose losses all others must have.
        baselines: the contender that another one's time is compared with; where none is given, the reference.
        tolerance: relative difference of losses that is allowed; None: that of ``TOLERANCE``.
    """

    op: str
    task: Task
    names: Sequence[str]
    ranks: int
    reference: str
    baselines: Mapping[str, str] = field(default_factory=dict)
    tolerance: float | None = None

    def baseline(self, name: str) -> str:
        return self.baselines.get(name, self.reference)


def measure(
    numel: int, dtype: str, names: Sequence[str], tokens: Sequence[int], rounds: int, say: Say
) -> tuple[list[Row], dict[str, str]]:
    """Measure ``names`` and ``ddp`` for each number of ``tokens``. Returns the rows, and the versions of other packages
    or why one is left out."""
    tasks = [make_task(numel, dtype, count, torch.device("cpu")) for count in tokens]
    return hold_all([Contest("train_step", task, in_order(names, DDP), RANKS, DDP) for task in tasks], rounds, say)


def make_task(numel: int, dtype: str, tokens: int, device: torch.device) -> Task:
    seq = SEQ[device.type]
    return Task(replace(model_config(numel, device), seq=seq), DTYPES[dtype], tokens // seq, device)


def hold_all(contests: Iterable[Contest], rounds: int, say: Say) -> tuple[list[Row], dict[str, str]]:
    """Hold all contests. Returns the rows, and the versions of other packages or why one is left out."""
    rows: list[Row] = []
    packages: dict[str, str] = {}
    for contest in contests:
        of_contest, with_packages = hold(contest, rounds, say)
        rows += of_contest
        packages |= with_packages
    return rows, packages


def hold(contest: Contest, rounds: int, say: Say) -> tuple[list[Row], dict[str, str]]:
    """Hold one contest. Returns the rows, and the versions of other packages or why one is left out."""
    task = contest.task
    say(f"{contest.op}: {contest.ranks} ranks, {task.tokens} tokens each")
    alone, left_out = train_alone(contest, say)
    check_losses(contest, alone)
    say(f"{contest.op}: {', '.join(alone)} in turn")
    laps = on_ranks(contest.ranks, time_on_rank, task, list(alone), rounds, device=task.device.type)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT(task.config, task.dtype).parameters())
    return make_rows(contest, numel, alone, slower(laps, in_all)), {**versions(alone), **left_out}


# -- alone: memory and losses ----------------------------------------------------------------------------------------


def train_alone(contest: Contest, say: Say) -> tuple[dict[str, Alone], dict[str, str]]:
    """Train each contender in processes of its own. Returns the results, and the errors of those that failed."""
    task, needed = contest.task, (contest.reference, *contest.baselines.values(), *OURS)

    def run(name: str) -> Alone:
        _check_makes_sense(task, name)
        say(f"{contest.op}: {name} alone")
        return most(on_ranks(contest.ranks, alone_on_rank, task, name, device=task.device.type))

    return each_alone(contest.names, needed, run, say)


def _check_makes_sense(task: Task, name: str) -> None:
    """Raise RanksError, before a process is started, for a contender that cannot run or would be another one."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        raise RanksError("not installed")
    if name in FORMS and task.dtype != torch.bfloat16:
        raise RanksError("a split master is of bf16 parameters")
    if name == DDP_AUTOCAST and task.dtype == torch.float32:
        raise RanksError(f"in fp32 it is {DDP}")


def in_order(names: Iterable[str], *always: str) -> list[str]:
    """Sort names as MAKERS has them."""
    return [name for name in MAKERS if name in {*names, *always}]


def versions(names: Iterable[str]) -> dict[str, str]:
    return {
        package: version(package) for package in dict.fromkeys(PACKAGES[name] for name in names if name in PACKAGES)
    }


def alone_on_rank(task: Task, name: str) -> Alone:
    device = task.device
    measurable = peak_memory.can_measure(device)
    if measurable and device.type == "cpu":
        peak_memory.return_what_is_freed()
    train(MAKERS[name](replace(task, config=TINY)), 2)  # loads all code first, so that its memory is not counted
    before = peak_memory.resident(device) if measurable else 0
    losses: list[float] = []
    made: list[Contender] = []

    def start() -> None:
        made.append(MAKERS[name](task))
        losses.extend(train(made[0], WARM_UP_STEPS))

    def go_on() -> None:
        losses.extend(train(made[0], STEADY_STEPS))

    if not measurable:
        start()
        go_on()
        return Alone(None, None, tuple(losses), None, _communicated(made[0]))
    start_peak, steady_peak = (peak_memory.peak_of(work, device) - before for work in (start, go_on))
    rest = peak_memory.resident(device) - before
    return Alone(steady_peak, max(start_peak, steady_peak), tuple(losses), rest, _communicated(made[0]))


def _communicated(contender: Contender) -> int:
    """Count the bytes of one more step, with compiled code run eagerly: torch dispatches no collective inside it."""
    with torch.compiler.set_stance("force_eager"), CountedTraffic() as traffic:
        train(contender, 1)
    return traffic.bytes


def train(contender: Contender, steps: int) -> list[float]:
    """Train so many steps. Returns this rank's loss in each."""
    losses = []
    for _ in range(steps):
        for lap in contender.job:
            lap()
        losses.append(contender.last_loss())
    return losses


def most(reports: Sequence[Alone]) -> Alone:
    """Combine the ranks' reports: the most of each figure, and the mean losses."""
    losses = tuple(statistics.fmean(of_step) for of_step in zip(*(report.losses for report in reports), strict=True))

    def largest(name: str) -> int | None:
        return max((figure for report in reports if (figure := getattr(report, name)) is not None), default=None)

    return Alone(largest("steady"), largest("start"), losses, largest("rest"), largest("communicated"))


def check_losses(contest: Contest, alone: Mapping[str, Alone]) -> None:
    """Raise ZeroOptimError where losses differ from the reference's: such figures could not be compared."""
    reference, tolerance = contest.reference, contest.tolerance or TOLERANCE[contest.task.dtype]
    for name, report in alone.items():
        for step, (loss, other) in enumerate(zip(report.losses, alone[reference].losses, strict=True), start=1):
            if not math.isclose(loss, other, rel_tol=tolerance):
                raise ZeroOptimError(
                    f"{contest.op}: {name} has loss {loss:.5f} in step {step}, {reference} {other:.5f}"
                )


# -- together: time --------------------------------------------------------------------------------------------------


def time_on_rank(task: Task, names: Sequence[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Time every lap of every contender in every round on this rank, in milliseconds."""
    contenders = {name: MAKERS[name](task) for name in names}
    clock: Clock = TogetherClock(make_comm(), task.device, make_clock(task.device))
    times = interleaved(
        {name: contender.job for name, contender in contenders.items()}, clock, TimedRounds.exactly(rounds)
    )
    return {
        name: [dict(zip(contenders[name].laps, of_round, strict=True)) for of_round in of_name]
        for name, of_name in times.items()
    }


def make_rows(
    contest: Contest, numel: int, alone: Mapping[str, Alone], laps: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[Row]:
    task = contest.task
    spreads = {name: Spread.of([*map(in_all, laps[name])]) for name in laps}
    dtype = next(name for name, dtype in DTYPES.items() if dtype == task.dtype)
    return [
        Row.of_whole(
            op=contest.op,
            backend=name,
            dtype=dtype,
            numel=numel,
            spread=spread,
            vs_torch=spreads[contest.baseline(name)].ms / spread.ms,
            vs={},
            phases={lap: Spread.of([of_round[lap] for of_round in laps[name]]).ms for lap in laps[name][0]},
            ranks=contest.ranks,
            tokens=task.tokens,
            tokens_per_s=round(contest.ranks // task.slices * task.tokens / spread.ms * 1e3, 1),
            memory=alone[name].memory,
            loss=round(alone[name].losses[-1], 5),
            baseline=contest.baseline(name),
            communicated=alone[name].communicated,
            keeps=keeps(name, task.dtype),
        )
        for name, spread in spreads.items()
    ]
