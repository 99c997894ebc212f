"""Saving and loading against the disk itself, plain ``torch.save`` of shards, and DCP on FSDP2.

Each contender writes and reads the same number of bytes: fp32 parameters and two moments, sharded over the ranks. A
save ends when all is on the disk. A load reads from the disk: files are dropped from the page cache before. *Blocked*
is the time in which the program cannot train, until the call that saves returns.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import checkpoint
from ..comm.collectives import Comm, make_comm
from ..drop_ins import ShardedAdamW
from ..shard_module import shard_module
from .contest import Say
from .peak_memory import peak_of, resident, return_what_is_freed
from .ranks import on_ranks
from .rows.checkpoint import CheckpointRow
from .timing import Spread

NUMEL = 2**25
RANKS = (2,)
ROUNDS = 5
DISK, TORCH_SAVE, DCP, DCP_ASYNC = "disk", "torch.save", "fsdp2 dcp", "fsdp2 dcp async"
OURS, BACKGROUND = "ours", "ours background"
WIDTH = 1024
CHUNK = 8 * 2**20


@dataclass(frozen=True)
class Lap:
    """Seconds of one rank in a round: until the call of saving returned, until all was on the disk, and of loading."""

    blocked: float
    saved: float
    loaded: float


Extra = dict[str, dict[str, int]]
"""By contender, the most extra bytes of memory in ``save`` and in ``load``."""


class CheckpointContender(Protocol):
    """A way to save to a folder, and to load from it."""

    def begin(self, folder: Path) -> None:
        """Begin to save. Training may go on when this returns."""

    def finish(self) -> None:
        """Wait for the save. All is on the disk when this returns."""

    def renew(self) -> None:
        """Make new model and optimizer to load into, as a job that resumes does. This is not timed."""

    def load(self, folder: Path) -> None: ...


class RawDisk:
    """Plain writes and reads of as many bytes: the speed of the disk alone."""

    def __init__(self, nbytes: int) -> None:
        self._values = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self._view = memoryview((ctypes.c_ubyte * nbytes).from_address(self._values.data_ptr())).cast("B")

    def begin(self, folder: Path) -> None:
        file = os.open(_own_file(folder), os.O_WRONLY | os.O_CREAT)
        for start in range(0, len(self._view), CHUNK):
            os.write(file, self._view[start : start + CHUNK])
        os.fsync(file)
        os.close(file)

    def finish(self) -> None:
        """No effect: it is written already."""

    def renew(self) -> None:
        """No effect: there is memory alone."""

    def load(self, folder: Path) -> None:
        file = os.open(_own_file(folder), os.O_RDONLY)
        for start in range(0, len(self._view), CHUNK):
            os.preadv(file, [self._view[start : start + CHUNK]], start)
        os.close(file)


class TorchSave:
    """``torch.save`` and ``torch.load`` of each rank's own shards, as a list of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def begin(self, folder: Path) -> None:
        with _own_file(folder).open("wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """No effect: it is written already."""

    def renew(self) -> None:
        """No effect: there are tensors alone."""

    def load(self, folder: Path) -> None:
        loaded = torch.load(_own_file(folder), weights_only=True)
        for tensor, value in zip(self._tensors, loaded, strict=True):
            tensor.copy_(value)


class Fsdp2:
    """FSDP2 with fused AdamW, saved by ``torch.distributed.checkpoint``; with ``background`` by its ``async_save``."""

    def __init__(self, numel: int, *, background: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._numel, self._mesh = numel, init_device_mesh("cpu", (dist.get_world_size(),))
        self.renew()
        _step(self._model, self._opt)
        self._group = dist.new_group() if background else None
        self._saving: Any = None

    def renew(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self._model = make_model(self._numel)
        for module in (*self._model, self._model):
            fully_shard(module, mesh=self._mesh)
        self._opt = torch.optim.AdamW(self._model.parameters(), fused=True)

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        of_model, of_optimizer = get_state_dict(self._model, self._opt)
        return {"model": of_model, "optim": of_optimizer}

    def begin(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        if self._group is None:
            dcp.save(self._state(), checkpoint_id=folder)
        else:
            self._saving = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self._group)

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self._model, self._opt, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Ours:
    """``ShardedAdamW`` at stage 3. ``background``: training might go on while it is saved."""

    def __init__(self, numel: int, *, background: bool) -> None:
        self._numel, self._background = numel, background
        self.model, self.opt = self._make()
        _step(self.model, self.opt)

    def _make(self) -> tuple[nn.Module, ShardedAdamW]:
        model = shard_module(make_model(self._numel), (nn.Linear,))
        return model, ShardedAdamW(model.named_parameters())

    def renew(self) -> None:
        self.opt.close()
        self.model, self.opt = self._make()

    def begin(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.opt, background=self._background)

    def finish(self) -> None:
        checkpoint.wait()

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, self.model, self.opt)

    def tensors(self) -> Iterator[Tensor]:
        """Give the tensors that this rank has."""
        yield from (parameter.local for parameter in self.model.parameters())  # type: ignore[attr-defined]
        yield from self.opt.engine.states.values(stored=True)


def make_model(numel: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = max(2, round(numel / (WIDTH * (WIDTH + 1))))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    opt.step()
    opt.zero_grad()


def _own_file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}"


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(numel: int, ranks: Sequence[int], rounds: int, say: Say) -> list[CheckpointRow]:
    """Make a row of each contender on each number of ranks."""
    rows: list[CheckpointRow] = []
    for count in ranks:
        say(f"checkpoint: {count} ranks, {numel:,} parameters")
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
            of_ranks = on_ranks(count, on_rank, numel, rounds, folder)
        nbytes = sum(written for written, _, _ in of_ranks)
        numel_there = sum(parameter.numel() for parameter in make_model(numel).parameters())
        extra = [of_rank for _, _, of_rank in of_ranks]
        rows += make_rows([laps for _, laps, _ in of_ranks], extra, nbytes, numel_there, count)
    return rows


def on_rank(numel: int, rounds: int, folder: str) -> tuple[int, dict[str, list[Lap]], Extra]:
    """Measure on one rank: the bytes that it writes, the laps of each contender, and the extra memory of each."""
    ours = Ours(numel, background=False)
    own = [tensor.clone() for tensor in ours.tensors()]
    nbytes = sum(tensor.nbytes for tensor in own)
    contenders: dict[str, CheckpointContender] = {
        DISK: RawDisk(nbytes),
        TORCH_SAVE: TorchSave(own),
        DCP: Fsdp2(numel, background=False),
        DCP_ASYNC: Fsdp2(numel, background=True),
        OURS: ours,
        BACKGROUND: Ours(numel, background=True),
    }
    laps: dict[str, list[Lap]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds + 1):  # the first warms up: buffers are allocated in it
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            lap = _lap(contenders[name], Path(folder) / name.replace(" ", "-"))
            if turn > 0:
                laps[name].append(lap)
    return_what_is_freed()  # it takes time, so it comes last
    extra = {name: _extra(contender, Path(folder) / name.replace(" ", "-")) for name, contender in contenders.items()}
    return nbytes, laps, extra


def _lap(contender: CheckpointContender, folder: Path) -> Lap:
    comm = _fresh(folder)
    start = time.perf_counter()
    contender.begin(folder)
    blocked = time.perf_counter() - start
    contender.finish()
    comm.gather_objects(None, "the bench")
    saved = time.perf_counter() - start
    if comm.rank == 0:
        for file in folder.rglob("*"):
            _drop_from_cache(file)
    contender.renew()
    comm.gather_objects(None, "the bench")
    start = time.perf_counter()
    contender.load(folder)
    comm.gather_objects(None, "the bench")
    return Lap(blocked, saved, time.perf_counter() - start)


def _fresh(folder: Path) -> Comm:
    """Collective. Make an empty folder."""
    comm = make_comm()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    comm.gather_objects(None, "the bench")
    return comm


def _drop_from_cache(file: Path) -> None:
    if file.is_file():
        opened = os.open(file, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def _most_beside(work: Callable[[], object]) -> int:
    """Peak of resident bytes during ``work``, less those before it."""
    before = resident()
    return peak_of(work) - before


def _extra(contender: CheckpointContender, folder: Path) -> dict[str, int]:
    """Measure the extra memory of saving, and of loading what was saved."""

    def save() -> None:
        contender.begin(folder)
        contender.finish()

    _fresh(folder)
    return {"save": _most_beside(save), "load": _most_beside(lambda: contender.load(folder))}


def make_rows(
    of_ranks: Sequence[dict[str, list[Lap]]], extra: Sequence[Extra], nbytes: int, numel: int, ranks: int
) -> list[CheckpointRow]:
    """Take the slowest rank of each round, then medians over rounds. Ratios to the disk are taken round by round."""
    rows = []
    slowest = {name: _slowest([laps[name] for laps in of_ranks]) for name in of_ranks[0]}
    for name, laps in slowest.items():
        save, load, blocked = (
            Spread.of([1e3 * getattr(lap, part) for lap in laps]) for part in ("saved", "loaded", "blocked")
        )
        disk = slowest[DISK]
        of_disk = {
            "save": _median([at.saved / lap.saved for at, lap in zip(disk, laps, strict=True)]),
            "load": _median([at.loaded / lap.loaded for at, lap in zip(disk, laps, strict=True)]),
        }
        rows.append(
            CheckpointRow(
                op="checkpoint",
                backend=name,
                dtype="fp32",
                numel=numel,
                ranks=ranks,
                rounds=len(laps),
                written=nbytes,
                save=save.figures,
                load=load.figures,
                blocked=blocked.figures,
                of_disk=of_disk,
                extra={part: max(of_rank[name][part] for of_rank in extra) for part in ("save", "load")},
            )
        )
    return rows


def _slowest(of_ranks: Sequence[Sequence[Lap]]) -> list[Lap]:
    return [
        Lap(*(max(getattr(lap, name) for lap in of_round) for name in Lap.__dataclass_fields__))
        for of_round in zip(*of_ranks, strict=True)
    ]


def _median(values: Sequence[float]) -> float:
    return round(Spread.of(list(values)).ms, 4)
