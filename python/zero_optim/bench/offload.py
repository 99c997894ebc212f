"""State off the device: time and memory of each store, against ``None``, the link, the disk, and other packages.

There are two parts. *step* is the update alone on one rank, from 16-bit gradients to 16-bit parameters. *train* is
whole steps of a GPT on ranks, where stores work beside backward.

Each contender first runs alone in fresh processes, to count the bytes that it moves and the memory that it needs. Then
all take turns in the same processes. For each of ours its bytes are also moved by plain copies, and by plain reads and
writes: its step could hide that time, and is compared with it.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..comm.collectives import make_comm
from ..errors import ZeroOptimError
from ..train.model import GPT
from . import adam_step, peak_memory
from . import offload_contenders as who
from .case import Setting
from .contest import Say, TogetherClock, each_alone, settle, slower
from .offload_contenders import HELD, MOVED, NONE, OURS, SMALLER, Training, Update, Workload
from .offload_links import DiskLink, Link
from .ranks import on_ranks
from .rows.offload import OffloadRow
from .timing import HostClock, Job, Spread, TimedRounds, interleaved
from .train_step import DTYPES, TOKENS, TOLERANCE, make_task

NUMELS = {"cpu": 2**26, "cuda": 2**28}
TRAINED = 4  # the GPT has a quarter of the parameters
RANKS = 2
ROUNDS = 11
WARM_UP_STEPS, STEADY_STEPS = 3, 2  # updates are speculated from the third step on
COPIES, DISK, UPDATE = "copies", "disk", "update"

Laps = dict[str, list[float]]  # ms of each job in each round


@dataclass(frozen=True)
class OffloadAlone:
    """A contender that ran alone.

    Attributes:
        results: a result of each rank after the same steps. All of ours have the same bits.
        peak: peak bytes, less those before; None where it cannot be measured.
        moved: bytes that ours move in a step, by way; empty for other packages.
        held: bytes of the state, by place.
        speculated: counts of updates of shards made before the norm was known, ``right`` and ``redone``.
    """

    results: tuple[float, ...]
    peak: int | None
    moved: dict[str, int]
    held: dict[str, int]
    speculated: dict[str, int] | None


@dataclass(frozen=True)
class OffloadContest:
    """The contenders ``names`` on a part's work. ``part``: "step" or "train", as in rows."""

    part: str
    work: Workload
    names: Sequence[str]
    ranks: int


def measure(
    numel: int, dtype: str, names: Sequence[str], ranks: int, rounds: int, device: torch.device, say: Say
) -> tuple[list[OffloadRow], dict[str, str]]:
    """Measure both parts. Returns the rows, and the version of each other package, or why it is left out."""
    numel = max(numel // (4 * who.PAGES), 1) * 4 * who.PAGES
    missing = {name: why for name in names if (why := who.why_missing(name, device, DTYPES[dtype])) is not None}
    for name, why in missing.items():
        say(f"left out: {name}: {why}")
    present = tuple(name for name in names if name not in missing)
    with tempfile.TemporaryDirectory(prefix="bench-offload-") as name:
        folder = Path(name)
        rows: list[OffloadRow] = []
        task = make_task(numel // TRAINED, dtype, TOKENS[device.type][0], device)
        with torch.device("meta"):
            trained = sum(parameter.numel() for parameter in GPT(task.config, task.dtype).parameters())
        for part, work, count in (
            ("step", Update(numel, DTYPES[dtype], device, folder), 1),
            ("train", Training(task, folder, trained), ranks),
        ):
            contest = OffloadContest(part, work, list(who.field(work, present, count)), count)
            of_contest, left_out = hold(contest, dtype, rounds, say)
            rows += of_contest
            missing |= left_out
    return rows, who.versions([name for name in present if name not in missing]) | missing


def hold(contest: OffloadContest, dtype: str, rounds: int, say: Say) -> tuple[list[OffloadRow], dict[str, str]]:
    alone, left_out = run_alone(contest, say)
    say(f"offload, {contest.part}: {', '.join(alone)} in turn")
    moved = {name: report.moved for name, report in alone.items()}
    device = contest.work.device.type
    laps = on_ranks(contest.ranks, time_on_rank, contest.work, moved, contest.ranks, rounds, device=device)
    return make_rows(contest, dtype, alone, slower(laps, float)), left_out


# -- alone ---------------------------------------------------------------------------------------------------------


def run_alone(contest: OffloadContest, say: Say) -> tuple[dict[str, OffloadAlone], dict[str, str]]:
    """Run each contender alone. Raises ZeroOptimError where one of ours fails, or has another result than ``None``."""
    work, ranks = contest.work, contest.ranks

    def run(name: str) -> OffloadAlone:
        say(f"offload, {contest.part}: {name} alone")
        return most(on_ranks(ranks, alone_on_rank, work, name, ranks, device=work.device.type))

    alone, left_out = each_alone(contest.names, (*OURS, *SMALLER), run, say)
    check_results(contest, alone)
    return alone, {f"{name}, {contest.part}": why for name, why in left_out.items()}


def check_results(contest: OffloadContest, alone: Mapping[str, OffloadAlone]) -> None:
    """Raise ZeroOptimError where results differ: their figures could not be compared.

    Ours must agree bit by bit; others' losses agree but for rounding. So do our losses of a training on CUDA, where
    attention adds up gradients in whatever order its blocks come.
    """
    expected = alone[NONE].results
    exact = contest.part != "train" or contest.work.device.type != "cuda"
    for name, report in alone.items():
        if name in OURS and exact:
            same = report.results == expected
        else:
            alike = functools.partial(math.isclose, rel_tol=TOLERANCE[contest.work.dtype])
            same = contest.part != "train" or all(map(alike, report.results, expected))
        if not same:
            raise ZeroOptimError(f"offload, {contest.part}: {name} gives {report.results}, and {NONE} {expected}")


def most(reports: Sequence[OffloadAlone]) -> OffloadAlone:
    """Take the report of the rank that needs most, with the results of all."""
    results = tuple(result for report in reports for result in report.results)
    return replace(max(reports, key=lambda report: report.peak or 0), results=results)


def alone_on_rank(work: Workload, name: str, ranks: int) -> OffloadAlone:
    measurable = peak_memory.can_measure(work.device)
    if measurable and work.device.type == "cpu":
        peak_memory.return_what_is_freed()
    before = peak_memory.resident(work.device) if measurable else 0
    made = who.make(work, name, ranks)
    _run(made.job, WARM_UP_STEPS)
    steady = functools.partial(_run, made.job, STEADY_STEPS)
    peak = peak_memory.peak_of(steady, work.device) - before if measurable else steady()
    result, earlier = made.result(), made.account()
    _run(made.job, 1)
    later = made.account()
    moved = {key: later[key] - earlier[key] for key in MOVED if key in later}
    return OffloadAlone(
        (result,), peak, moved, {key: later[key] for key in HELD if key in later}, later.get("speculated")
    )


def _run(job: Job, steps: int) -> None:
    for _ in range(steps):
        for lap in job:
            lap()


# -- together ------------------------------------------------------------------------------------------------------


def time_on_rank(work: Workload, moved: Mapping[str, Mapping[str, int]], ranks: int, rounds: int) -> Laps:
    """Time each contender, and its bytes moved by themselves: ``NAME/copies``, ``NAME/disk``. On CUDA also ``update``,
    the update on the host."""
    jobs: dict[str, Job] = {}
    link, disk = _make_links(work, moved)
    for name, of_step in moved.items():
        jobs[name] = who.make(work, name, ranks).job
        if link is not None and of_step and of_step["to_device"] + of_step["to_host"]:
            jobs[f"{name}/{COPIES}"] = [functools.partial(link.move, of_step["to_device"], of_step["to_host"])]
        if disk is not None and of_step and of_step["read"] + of_step["written"]:
            jobs[f"{name}/{DISK}"] = [functools.partial(disk.move, of_step["read"], of_step["written"])]
    if work.device.type == "cuda" and isinstance(work, Update):
        jobs[UPDATE] = [_update_on_host(work)]
    clock = TogetherClock(make_comm(), work.device, HostClock())  # the host's clock: copies count until they end
    settled: dict[str, Job] = {name: [*job, functools.partial(settle, work.device)] for name, job in jobs.items()}
    times = interleaved(settled, clock, TimedRounds.exactly(rounds))
    return {name: [sum(laps) for laps in of_job] for name, of_job in times.items()}


def _update_on_host(work: Update) -> Callable[[], None]:
    """Make the job of the update on the host by itself, that of "cpu", as one shard."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == work.dtype)
    return adam_step.ours(adam_step.make_shard(Setting(torch.device("cpu"), dtype, work.numel, ())))


def _make_links(work: Workload, moved: Mapping[str, Mapping[str, int]]) -> tuple[Link | None, DiskLink | None]:
    def most(*keys: str) -> int:
        return max((of_step.get(key, 0) for of_step in moved.values() for key in keys), default=0)

    copied, stored = most("to_device", "to_host"), most("read", "written")
    link = Link(copied, max(copied // who.PAGES, 4096), work.device) if copied else None
    return link, DiskLink(work.folder, stored) if stored else None


# -- rows ----------------------------------------------------------------------------------------------------------


def make_rows(contest: OffloadContest, dtype: str, alone: Mapping[str, OffloadAlone], laps: Laps) -> list[OffloadRow]:
    rows = []
    for name, report in alone.items():
        beside = {what: laps[job] for what in (COPIES, DISK) if (job := f"{name}/{what}") in laps}
        if UPDATE in laps and report.held and not report.held["device"]:
            beside[UPDATE] = laps[UPDATE]
        spread = Spread.of(laps[name])
        bound, fraction = held_to(spread.ms, laps[NONE], beside) if contest.part == "step" and beside else (None, None)
        rows.append(
            OffloadRow(
                op="offload",
                backend=name,
                dtype=dtype,
                numel=contest.work.numel,
                ranks=contest.ranks,
                rounds=spread.rounds,
                part=contest.part,
                time=spread.figures,
                versus=round(Spread.of(laps[NONE]).ms / spread.ms, 4),
                moved=report.moved or None,
                held=report.held or None,
                peak=report.peak,
                beside={what: Spread.of(times).ms for what, times in beside.items()},
                hidden=hidden(laps[name], laps[NONE], beside) if beside else None,
                bound=bound,
                fraction=fraction,
                speculated=report.speculated,
            )
        )
    return rows


def hidden(laps: Sequence[float], none: Sequence[float], beside: Mapping[str, Sequence[float]]) -> float:
    """Compute the share of the times ``beside`` that a step hides, that is not longer than None's: median of rounds."""
    shares = [
        1 - (of_round - without) / sum(apart)
        for of_round, without, *apart in zip(laps, none, *beside.values(), strict=True)
    ]
    return round(min(max(statistics.median(shares), 0.0), 1.0), 4)


def held_to(ms: float, none: Sequence[float], beside: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """Find the longest part of a step, which it cannot be shorter than, and that part's share of the step's time."""
    parts = {what: statistics.median(times) for what, times in beside.items()}
    if UPDATE not in parts:
        parts[NONE] = statistics.median(none)
    longest = max(parts, key=lambda what: parts[what])
    return longest, round(parts[longest] / ms, 4)
