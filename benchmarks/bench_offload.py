"""Stores of optimizer state against ``None``, plain copies and the disk; sleep and wake.

    python benchmarks/bench_offload.py --numel 64Mi

Parts (key ``part`` of a row), on one rank: ``step`` is ``opt.step()`` alone, from 16-bit gradients and parameters;
``forward`` has parameters on the host or a disk; ``sleep`` and wake. ``bench_training.py stores`` has whole steps.

``beside`` has the ms of what a store adds, each part moved by itself in the same rounds: ``copies``, ``disk``, on a GPU
``update`` on the host. A step cannot be shorter than the longest of these and None's update, its ``bound``.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from lab import parser_of, progress, run_script, show
from torch import Tensor, nn
from zero_optim import ShardedAdamW, shard_module
from zero_optim.asleep import MOVES_STORAGES
from zero_optim.bench.cases import DTYPES, HYPER, Row
from zero_optim.bench.record import Result
from zero_optim.bench.run import find_device
from zero_optim.bench.timing import Clock, Job, Spread, interleaved
from zero_optim.errors import UsageError, ZeroOptimError
from zero_optim.params.layout import round_up
from zero_optim.stores.disk_pages import memory_of, set_direct
from zero_optim.stores.host_memory import ALIGNMENT, HostMemory

NONE = "None"
EXACT = (NONE, "paged 0", "paged half", "cpu", "nvme")
SMALL = ("paged 0 small", "nvme small")  # with a split master and 8-bit moments, which round
NUMELS = {"cpu": 2**26, "cuda": 2**28}
PAGES = 32
MOVED, HELD = ("to_device", "to_host", "read", "written"), ("device", "host", "disk")
BLOCK_BYTES, THREADS = 4 * 2**20, 16  # fastest of 1 to 16 MiB and 4 to 16 threads on a virtual disk: 6.1 GB/s written


@dataclass(frozen=True)
class Work:
    """What all contenders update. ``folder``: of the files of ``nvme``."""

    numel: int
    dtype: str
    device: torch.device
    folder: str

    def tensors(self, seed: int) -> list[Tensor]:
        """Draw parameters or gradients, four tensors a page."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(self.numel, generator=generator, device=self.device).to(DTYPES[self.dtype])
        return [part.clone() for part in values.chunk(4 * PAGES)]


# -- contenders --------------------------------------------------------------------------------------------------------


def make(work: Work, name: str) -> ShardedAdamW:
    """Make a contender, ready for its first step. All have buckets, and so pages, of one size.

    One backward sets gradients for every step.
    """
    stores: dict[str, Row] = {
        NONE: {},
        "paged 0": {"state_offload": "paged", "device_budget": 0},
        "paged half": {"state_offload": "paged", "device_budget": 10 * work.numel // 2},
        "cpu": {"state_offload": "cpu"},
        "nvme": {"state_offload": f"nvme:{work.folder}"},
    }
    options = stores[name.removesuffix(" small")] | {"bucket_cap_mb": work.numel * 2 / 2**20 / PAGES}
    if name in SMALL:
        options |= {"master": "split", "state_dtype": "int8"}
    parameters = [nn.Parameter(values) for values in work.tensors(0)]
    opt = ShardedAdamW(parameters, skip_nonfinite=False, **options, **HYPER)
    torch.autograd.backward(parameters, work.tensors(1))
    return opt


def job_of(opt: ShardedAdamW) -> list[Callable[[], object]]:
    # Pages that a step has left in flight must not slow down the next contender.
    return [opt.step, getattr(opt.engine.store, "wait", lambda: None)]


# -- the link and the disk ---------------------------------------------------------------------------------------------


class Link:
    """Copies of pages between the device and host memory, pinned for a GPU, both ways at once there."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """``nbytes``: the most that ``move`` is asked for, one way."""
        gpu, self._page = device.type == "cuda", max(nbytes // PAGES, ALIGNMENT)
        self._host = HostMemory(pinned=gpu, device=device).take(max(nbytes, self._page)).zero_()
        self._there = [torch.zeros(self._page, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) if gpu else None for _ in range(2)]

    def move(self, to_device: int, to_host: int) -> None:
        """Copy so many bytes each way. On a GPU this returns before the copies end."""
        for inward, nbytes, stream, page in zip((1, 0), (to_device, to_host), self._streams, self._there, strict=True):
            with torch.cuda.stream(stream):
                for start in range(0, nbytes, self._page):
                    here = self._host[start : min(start + self._page, nbytes)]
                    there = page[: len(here)]
                    (there if inward else here).copy_(here if inward else there, non_blocking=True)


class DiskLink:
    """Reads and writes of large blocks past the system's cache, by a few threads each way, both ways at once."""

    def __init__(self, folder: str, nbytes: int) -> None:
        """``nbytes``: the most that ``move`` is asked for, one way. So many are written when this returns."""
        self._opened = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it is open for as long as this is there
        self._file = self._opened.fileno()
        set_direct(self._file)
        self._blocks = max(-(-nbytes // BLOCK_BYTES), 1)
        self._buffers = HostMemory(pinned=False).take(2 * THREADS * BLOCK_BYTES).fill_(1).split(BLOCK_BYTES)
        self._pools = [ThreadPoolExecutor(THREADS) for _ in range(2)]
        self.move(0, self._blocks * BLOCK_BYTES)

    def move(self, read: int, written: int) -> None:
        """Move so many bytes, rounded up to 4096. Writes are half a file ahead of reads, so that both go on at once."""
        parts: list[Future[Any]] = []
        for number in range(self._blocks):
            ahead = (number + self._blocks // 2) % self._blocks
            ways = ((os.preadv, read, number), (os.pwritev, written, ahead))
            for way, (work, nbytes, place) in enumerate(ways):
                size = min(nbytes - number * BLOCK_BYTES, BLOCK_BYTES)
                if size > 0:
                    buffer = self._buffers[way * THREADS + number % THREADS][: round_up(size, ALIGNMENT)]
                    parts.append(self._pools[way].submit(work, self._file, [memory_of(buffer)], place * BLOCK_BYTES))
        for part in parts:
            part.result()


# -- step ------------------------------------------------------------------------------------------------------------


def contest(work: Work, names: Sequence[str], rounds: int) -> list[Row]:
    """Run a few steps of each contender, for its result and its bytes, then all in turns. Returns the rows.

    Raises ZeroOptimError where parameters differ in a bit: a store that computes something else has no figures.
    """
    progress(f"offload: {', '.join(names)}")
    made = {name: make(work, name) for name in names}
    reports = {name: report_of(opt) for name, opt in made.items()}
    for name in set(EXACT) & set(reports):
        if reports[name]["result"] != reports[NONE]["result"]:
            raise ZeroOptimError(f"offload: parameters of {name} differ from those of {NONE}")
    jobs = {name: job_of(opt) for name, opt in made.items()} | beside(work, reports)
    if work.device.type == "cuda":
        for job in jobs.values():
            job.append(torch.cuda.synchronize)  # and the host's clock: copies count until they end
    times = interleaved(jobs, Clock(), rounds)
    laps = {name: [sum(of_round) for of_round in of_job] for name, of_job in times.items()}
    return [row_of(work, name, report, laps) for name, report in reports.items()]


def report_of(opt: ShardedAdamW) -> Row:
    """Run a few steps. Returns the result of the first three, and bytes moved in a step and held."""
    for lap in job_of(opt) * 3:
        lap()
    result = sum(parameter.detach().double().sum().item() for parameter in opt.param_groups[0]["params"])
    earlier = dict(opt.stats()["state_offload"])
    for lap in job_of(opt):
        lap()
    later = opt.stats()["state_offload"]
    moved = {key: later[key] - earlier[key] for key in MOVED if key in later}
    return {"result": result, "moved": moved, "held": {key: later[key] for key in HELD if key in later}}


def beside(work: Work, reports: Mapping[str, Row]) -> dict[str, list[Callable[[], object]]]:
    """Make jobs that move each contender's bytes by themselves: ``NAME/copies``, ``NAME/disk``; on CUDA ``update``."""
    moved = {name: report["moved"] for name, report in reports.items()}
    most = {key: max(of_step.get(key, 0) for of_step in moved.values()) for key in MOVED}
    link = Link(max(most["to_device"], most["to_host"]), work.device)
    disk = DiskLink(work.folder, max(most["read"], most["written"])) if most["written"] else None
    jobs: dict[str, list[Callable[[], object]]] = {}
    for name, of_step in moved.items():
        if of_step.get("to_device"):
            jobs[f"{name}/copies"] = [functools.partial(link.move, of_step["to_device"], of_step["to_host"])]
        if disk is not None and of_step.get("written"):
            jobs[f"{name}/disk"] = [functools.partial(disk.move, of_step["read"], of_step["written"])]
    if work.device.type == "cuda":
        jobs["update"] = job_of(make(replace(work, device=torch.device("cpu")), NONE))
    return jobs


def row_of(work: Work, name: str, report: Row, laps: Mapping[str, Sequence[float]]) -> Row:
    """Make a row. ``laps``: ms of each job in each round."""
    medians = {job: statistics.median(times) for job, times in laps.items()}
    parts = {what: medians[f"{name}/{what}"] for what in ("copies", "disk") if f"{name}/{what}" in medians}
    if "update" in medians and report["held"] and not report["held"]["device"]:
        parts["update"] = medians["update"]
    row = {
        **about("step", name, work, Spread.of(laps[name]), parts),
        "versus": round(medians[NONE] / medians[name], 4),
        **{key: report[key] or None for key in ("moved", "held")},
    }
    if parts:
        bounds = parts if "update" in parts else {**parts, NONE: medians[NONE]}
        row["bound"] = max(bounds, key=lambda what: bounds[what])
        row["fraction"] = round(bounds[row["bound"]] / medians[name], 4)
    return row


def about(part: str, name: str, work: Work, spread: Spread, parts: Mapping[str, float]) -> Row:
    first = {"op": "offload", "backend": name, "dtype": work.dtype, "numel": work.numel, "ranks": 1}
    return {**first, "part": part, **vars(spread), "beside": dict(parts)}


# -- forward, sleep ----------------------------------------------------------------------------------------------------


def forward(work: Work, rounds: int) -> list[Row]:
    """Compare a forward of no rows, with units from the host and from a disk, with reads of as many bytes."""
    of, layers = {"dtype": DTYPES[work.dtype], "device": work.device}, max(work.numel // 4096**2, 1)
    nbytes = layers * 4096**2 * of["dtype"].itemsize
    jobs: dict[str, Job] = {"disk": [functools.partial(DiskLink(work.folder, nbytes).move, nbytes, 0)]}
    for name, where in {"cpu": "cpu", "nvme": f"nvme:{work.folder}"}.items():
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, **of) for _ in range(layers)))
        model = shard_module(model, (nn.Linear,), param_offload=where)
        jobs[name] = [functools.partial(model, torch.ones(0, 4096, **of))]
    with torch.no_grad():
        times = {name: Spread.of([lap[0] for lap in laps]) for name, laps in interleaved(jobs, Clock(), rounds).items()}
    disk, more = times.pop("disk").ms, {"moved": {"read": nbytes}, "bound": "disk"}
    rows = [about("forward", name, work, spread, {"disk": disk}) for name, spread in times.items()]
    return [{**row, **more, "fraction": round(disk / row["ms"], 4)} for row in rows]


def sleep(work: Work, rounds: int) -> list[Row]:
    """Compare ``sleep`` and ``wake`` with a copy of as many bytes. ``freed``: share of the GPU's memory to be freed."""
    gc.collect()  # the contenders of ``step``, whose memory must not be freed while it is counted
    gpu = work.device.type == "cuda"
    synchronize: Callable[[], object] = torch.cuda.synchronize if gpu else lambda: None
    taken: Callable[[], int] = torch.cuda.memory_allocated if gpu else lambda: 0
    before = taken()
    parameters = [nn.Parameter(values) for values in work.tensors(0)]
    opt = ShardedAdamW(parameters, **HYPER)
    torch.autograd.backward(parameters, work.tensors(1))
    opt.step()
    opt.zero_grad()
    of_what: dict[str, Row] = {}
    for what in ("state", "all")[: 1 + MOVES_STORAGES]:
        awake, kept = taken() - before, 0 if what == "all" else sum(parameter.nbytes for parameter in parameters)
        opt.sleep(parameters=what == "all")
        nbytes, left = opt.stats()["sleep"]["host"], taken() - before
        opt.wake()
        freed = round((awake - left) / (awake - kept), 4) if gpu else None
        of_what[what] = {"held": {"device": left if gpu else None, "host": nbytes, "disk": 0}, "freed": freed}
    jobs: dict[str, Job] = {}
    for what, row in of_what.items():  # once all memory is counted, as the copies take some
        nbytes = row["held"]["host"]
        there = torch.zeros(nbytes, dtype=torch.uint8, device=work.device)
        here = HostMemory(pinned=gpu, device=work.device).take(nbytes).zero_()
        pairs = ((here, there), (there, here))
        jobs[what] = [functools.partial(opt.sleep, parameters=what == "all"), lambda: (opt.wake(), synchronize())]
        jobs[f"copy {what}"] = [lambda pair=pair: (pair[0].copy_(pair[1], gpu), synchronize()) for pair in pairs]
    times = interleaved(jobs, Clock(), rounds)
    opt.close()
    rows = []
    for what, more in of_what.items():
        for lap, call in enumerate(("sleep", "wake")):
            spread, copy = (Spread.of([laps[lap] for laps in times[job]]) for job in (what, f"copy {what}"))
            row = about("sleep", f"{call}, {what}", work, spread, {"copy": copy.ms})
            rows.append({**row, **more, "bound": "copy", "fraction": round(copy.ms / spread.ms, 4)})
    return rows


# -- the run -----------------------------------------------------------------------------------------------------------


def run(parsed: Any) -> None:
    device = find_device(parsed.device)
    numel = round_up(parsed.numel or NUMELS[device.type], 4 * PAGES)
    known = (*EXACT, *SMALL) if parsed.dtype == "bf16" else EXACT  # a split master is of bf16 parameters
    for name in parsed.contenders or ():
        if name not in known:
            raise UsageError(f"--contenders {name}: choose from {', '.join(known)}")
    names = [name for name in known if name in {NONE, *(parsed.contenders or known)}]
    result = Result(device, parsed.out, parsed.write, "offload")
    with tempfile.TemporaryDirectory(prefix="bench-offload-") as folder:
        work = Work(numel, parsed.dtype, device, folder)
        result.add(contest(work, names, parsed.rounds))
        progress("offload: forward, sleep and wake")
        result.add(forward(work, parsed.rounds))
        result.add(sleep(work, parsed.rounds))
    show(result)


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Compares the stores of optimizer state with the link and the disk."
    parser = parser_of(__file__, about, device=None, dtype="bf16", numel=None, contenders=None, rounds=11)
    return run_script(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
