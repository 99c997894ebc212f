"""Saving and loading on ranks against the disk itself, and DCP on FSDP2.

    python benchmarks/bench_checkpoint.py --numel 32Mi --ranks 2 --rounds 9

Each contender writes and reads as many bytes: fp32 parameters and two moments, sharded over the ranks. A save ends when
all is on the disk. Files are dropped from the page cache before a load. *Blocked* is the time until the call that saves
returns: training may go on then. ``extra`` is the memory beyond what is there, in a round of its own. ``--width 8
--numel 80000`` has small parameters in place of large ones.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counted_bytes import peak_of, resident, return_what_is_freed
from lab import parser_of, progress, run_script, show
from ranks import TogetherClock, of_the_slower, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_optim import ShardedAdamW, checkpoint, shard_module
from zero_optim.bench.record import Result
from zero_optim.bench.timing import Job, Spread, interleaved
from zero_optim_cli.choices import at_least_one

CHUNK = 8 * 2**20
CPU = torch.device("cpu")
Report = tuple[int, dict[str, list[list[float]]], dict[str, dict[str, int]]]  # of a rank, as on_rank returns it


def make_model(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def one_step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.ones(1, model[0].in_features)).sum().backward()
    opt.step()
    opt.zero_grad()


def own_file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}"


class RawDisk:
    """Plain writes and reads of as many bytes: the speed of the disk alone. The base of all contenders."""

    def __init__(self, nbytes: int) -> None:
        self._values = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self._view = memoryview((ctypes.c_ubyte * nbytes).from_address(self._values.data_ptr())).cast("B")

    def begin(self, folder: Path) -> None:
        """Begin to save. Training may go on when this returns."""
        with own_file(folder).open("wb", buffering=0) as file:
            for start in range(0, len(self._view), CHUNK):
                file.write(self._view[start : start + CHUNK])
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Wait for the save. All is on the disk when this returns."""

    def renew(self) -> None:
        """Make new model and optimizer to load into, as a job that resumes does. This is not timed."""

    def load(self, folder: Path) -> None:
        with own_file(folder).open("rb", buffering=0) as file:
            for start in range(0, len(self._view), CHUNK):
                file.readinto(self._view[start : start + CHUNK])


class Fsdp2(RawDisk):
    """FSDP2 with fused AdamW, saved by ``torch.distributed.checkpoint``; in the background by its ``async_save``."""

    def __init__(self, make: Callable[[], nn.Module], background: bool) -> None:
        self._make_model, self._mesh = make, init_device_mesh("cpu", (dist.get_world_size(),))
        self.renew()
        one_step(self._model, self._opt)
        self._group = dist.new_group() if background else None
        self._saving: Any = None

    def renew(self) -> None:
        self._model = self._make_model()
        for module in (*self._model, self._model):
            fully_shard(module, mesh=self._mesh)
        self._opt = torch.optim.AdamW(self._model.parameters(), fused=True)

    def _state(self) -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(self._model, self._opt), strict=True))

    def begin(self, folder: Path) -> None:
        if self._group is None:
            dcp.save(self._state(), checkpoint_id=folder)
        else:
            self._saving = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self._group)

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self._model, self._opt, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Ours(RawDisk):
    """``ShardedAdamW`` at stage 3."""

    opt: ShardedAdamW | None = None

    def __init__(self, make: Callable[[], nn.Module], background: bool) -> None:
        self._make_model, self._background = make, background
        self.renew()
        one_step(self.model, self.opt)

    def renew(self) -> None:
        if self.opt is not None:
            self.opt.close()
        self.model = shard_module(self._make_model(), (nn.Linear,))
        self.opt = ShardedAdamW(self.model.named_parameters())

    def begin(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.opt, background=self._background)

    def finish(self) -> None:
        checkpoint.wait()

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, self.model, self.opt)

    def nbytes(self) -> int:
        """Count the bytes of the tensors that this rank has."""
        parameters: list[Any] = list(self.model.parameters())
        own = [*(parameter.local for parameter in parameters), *self.opt.engine.states.values(stored=True)]
        return sum(tensor.nbytes for tensor in own)


def on_rank(make: Callable[[], nn.Module], rounds: int, folder: str) -> Report:
    """Measure on one rank. Returns the bytes that it writes, and by contender the laps and the extra memory."""
    ours = Ours(make, background=False)
    nbytes = ours.nbytes()
    contenders: Mapping[str, RawDisk] = {
        "disk": RawDisk(nbytes),
        "fsdp2 dcp": Fsdp2(make, background=False),
        "fsdp2 dcp async": Fsdp2(make, background=True),
        "ours": ours,
        "ours background": Ours(make, background=True),
    }
    folders = {name: Path(folder) / name.replace(" ", "-") for name in contenders}
    jobs = {name: laps_of(contender, folders[name]) for name, contender in contenders.items()}
    times = interleaved(jobs, TogetherClock(CPU), rounds)
    return_what_is_freed()  # it takes time, so it comes last
    return nbytes, times, {name: extra_memory(contender, folders[name]) for name, contender in contenders.items()}


def laps_of(contender: RawDisk, folder: Path) -> Job:
    """List the laps of a round. The second is *blocked*, with the third it is the save, the last is the load."""

    def finish() -> None:
        contender.finish()
        dist.barrier()

    def prepare() -> None:
        files = [file for file in folder.rglob("*") if file.is_file()] if dist.get_rank() == 0 else []
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        contender.renew()
        dist.barrier()

    def load() -> None:
        contender.load(folder)
        dist.barrier()

    return [lambda: make_empty(folder), lambda: contender.begin(folder), finish, prepare, load]


def make_empty(folder: Path) -> None:
    """Collective. Make an empty folder."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()


def extra_memory(contender: RawDisk, folder: Path) -> dict[str, int]:
    """Measure the peak of resident bytes in a save and in a load of what was saved, less those before."""

    def save() -> None:
        contender.begin(folder)
        contender.finish()

    make_empty(folder)
    before = resident()
    saving = peak_of(save) - before
    before = resident()
    return {"save": saving, "load": peak_of(lambda: contender.load(folder)) - before}


def make_rows(reports: Sequence[Report], numel: int) -> list[dict[str, Any]]:
    """Take the slowest rank of each round, then medians over rounds; ``of_disk`` is taken round by round."""
    rows, disk = [], {}
    for name, rounds in of_the_slower([times for _, times, _ in reports]).items():
        laps = [{"blocked": begin, "save": begin + rest, "load": load} for _, begin, rest, _, load in rounds]
        times = {part: [of_round[part] for of_round in laps] for part in laps[0]}
        disk = disk or times  # the first contender
        row = {"op": "checkpoint", "backend": name, "dtype": "fp32", "numel": numel, "ranks": len(reports)}
        row |= {"rounds": len(laps), "written": sum(written for written, _, _ in reports)}
        for part, of_part in times.items():
            spread = Spread.of(of_part)
            row[part] = [spread.ms, spread.p20, spread.p80]
        row["of_disk"], row["extra"] = {}, {}
        for part in ("save", "load"):
            ratios = [plain / ms for plain, ms in zip(disk[part], times[part], strict=True)]
            row["of_disk"][part] = round(Spread.of(ratios).ms, 4)
            row["extra"][part] = max(extra[name][part] for _, _, extra in reports)
        rows.append(row)
    return rows


def run(parsed: Any) -> None:
    result = Result(CPU, parsed.out, parsed.write, "checkpoint")
    layers = max(2, round(parsed.numel / (parsed.width * (parsed.width + 1))))
    make = functools.partial(make_model, layers, parsed.width)
    progress(f"checkpoint: {parsed.ranks} ranks, {parsed.numel:,} parameters")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        of_ranks = on_ranks(parsed.ranks, on_rank, make, parsed.rounds, folder)
    result.add(make_rows(of_ranks, sum(parameter.numel() for parameter in make().parameters())))
    show(result)


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Compares saving and loading with the disk and DCP on FSDP2."
    parser = parser_of(__file__, about, numel=2**25, ranks=2, rounds=5)
    parser.add_argument("--width", type=at_least_one, default=1024, metavar="N", help="of each layer (1024)")
    return run_script(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
