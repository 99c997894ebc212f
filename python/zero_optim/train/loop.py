"""A step of the training, its text as bytes, and a run from start to end: the same code for one rank and for N."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import resource
import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from zero_optim_cli import distribution_version, say

from .. import GradScaler, ShardedAdamW, ShardedMuon, checkpoint, memory, shard_module
from ..checkpoint.folder import write_atomically
from ..comm.collectives import Comm
from ..comm.together import on_rank_0, together
from ..errors import UsageError
from ..rules.codec import DTYPES
from ..rules.muon import Muon
from ..shard_module import gather_parameters
from .model import GPT, RESUME_AUTO, Block, Flags, TrainConfig, fresh_config, generate, next_byte_loss, resumed_config
from .page import PICTURE, RUN, WHOLE, Session, tables, write_page
from .ranks import choose_device, join_ranks, local_ranks, watch_signals
from .run_dir import CHECKPOINTS, find_checkpoint, open_log, open_run, rewind, run_of

INTERRUPTED = 130  # the exit code of a shell's Ctrl-C
_VALIDATION_WINDOWS = 128
# Of the optimizer.
_OPTIONS = ("lr", "stage", "state_offload", "device_budget", "master", "state_dtype", "telemetry_every")
_PROMPT, _SAMPLE_LENGTH = 32, 400  # bytes
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
_SKIPPED_IN_STDLIB = {*_SKIPPED, "test", "tests", "idle_test", "lib2to3"}


class PhaseClock:
    """Seconds spent in each phase: on the host for a CPU, between events of the current stream for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """End a phase, which began at the mark before."""
        now: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            now.record()
        self._marks.append((phase, now))

    def collect(self) -> Mapping[str, float]:
        """Give the seconds of each phase since the first mark. On a GPU, call it after a wait for the device."""
        seconds: Counter[str] = Counter()
        for (_, start), (phase, end) in itertools.pairwise(self._marks):
            seconds[phase] += start.elapsed_time(end) / 1000 if self._on_gpu else end - start
        self._marks.clear()
        return seconds


class Trainer:
    """The training state that a checkpoint brings back: model, optimizer, loss scaler, schedule, random states."""

    def __init__(self, config: TrainConfig, corpus: Corpus, comm: Comm) -> None:
        self.config, self.corpus, self.comm = config, corpus, comm
        self.device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.model = GPT(config, DTYPES[config.dtype]).to(self.device)
        if config.stage >= 3:
            shard_module(self.model, units=(Block,), prefetch=1, param_offload=config.param_offload)
        named, decay = list(self.model.named_parameters()), config.weight_decay
        groups: list[dict[str, Any]] = []
        if config.optimizer == "muon":
            matrices, named = ShardedMuon.split(self.model)
            groups = [{"params": matrices, "rule": Muon(lr=config.muon_lr, weight_decay=decay)}]
        decaying = {"params": [(name, p) for name, p in named if p.ndim >= 2], "weight_decay": decay}
        others = {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0}  # gains and biases
        options: dict[str, Any] = {name: getattr(config, name) for name in _OPTIONS}
        self.optimizer = ShardedAdamW([decaying, others, *groups], betas=(0.9, 0.95), **options)
        self.optimizer.attach(self.model)
        self.scaler = GradScaler(enabled=config.dtype == "fp16")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self.clock, self.seconds = PhaseClock(self.device), Counter[str]()  # of all steps, by phase
        self.tracker = memory.track()
        self.steps_done = 0

    def step(self, *, asked_to_stop: bool) -> tuple[dict[str, Any], bool]:
        """Run one optimizer step over ``accumulate`` micro-batches. The host waits for the device once, after it.

        Returns its line of ``log.jsonl``, and whether some rank was asked to stop. Losses and norms are None where they
        are not finite; ``ms`` is of this rank; all else is equal on all ranks.
        """
        config, step, start = self.config, self.steps_done + 1, time.perf_counter()
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        self.clock.mark("start")
        for micro in range(config.accumulate):
            loss += self._micro_batch(step, micro)
        self.scaler.unscale_(self.optimizer)
        norm = self.optimizer.clip_grad_norm_(config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clock.mark("step")
        self.schedule.step()
        # One exchange and one read by the host, of the loss, the number of ranks that were asked to stop, and the norm.
        vector = torch.stack((loss, torch.full_like(loss, float(asked_to_stop))))
        self.comm.exchange(vector)
        total, stops, norm_value = torch.cat((vector, norm.reshape(1))).tolist()
        self.steps_done = step
        phases = self.clock.collect()
        self.seconds.update(phases)
        seconds = time.perf_counter() - start
        record = {
            "step": step,
            "loss": _finite(total / self.comm.world_size),
            "lr": lr,
            "grad_norm": _finite(norm_value),  # of the averaged gradients, before clipping
            "loss_scale": self.scaler.get_scale(),
            "tokens_per_s": self.comm.world_size * config.batch * config.seq * config.accumulate / seconds,
            "ms": {phase: round(1000 * value, 3) for phase, value in {**phases, WHOLE: seconds}.items()},
        }
        if (
            config.telemetry_every and self.optimizer.engine.steps % config.telemetry_every == 0
        ):  # finite numbers, to four digits to keep the log small
            numbers = self.optimizer.telemetry(over_ranks=True).floats().items()
            record["telemetry"] = {name: float(f"{value:.4g}") for name, value in numbers if math.isfinite(value)}
        return record, stops > 0

    def _micro_batch(self, step: int, micro: int) -> Tensor:
        """Add the gradients of one micro-batch. Returns its part of the step's loss, on the device."""
        config = self.config
        first = (micro * self.comm.world_size + self.comm.rank) * config.batch
        with contextlib.nullcontext() if micro == config.accumulate - 1 else self.optimizer.no_sync():
            numbers = range(first, first + config.batch)
            windows = draw_windows(self.corpus.train, config.seq, numbers, seed=config.seed, step=step)
            loss = next_byte_loss(self.model, windows.to(self.device)) / config.accumulate
            self.clock.mark("data and forward")
            self.scaler.scale(loss).backward()
            self.clock.mark("backward")
        return loss.detach()

    def _lr_factor(self, done: int) -> float:
        """Linear warm-up, then a cosine from 1 to 0.1 at the last step."""
        warmup, steps = min(self.config.warmup, self.config.steps // 4), self.config.steps
        if done < warmup:
            return (done + 1) / (warmup + 1)
        part = (done - warmup) / max(1, steps - warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, part)))

    def save(self, folder: Path) -> None:
        """Collective. Write the checkpoint of the last step into ``folder``."""
        extra = {"config": asdict(self.config), "data_digest": self.corpus.digest}
        more: dict[str, Any] = {"step": self.steps_done, "extra": extra, "keep_last": self.config.keep_last or None}
        checkpoint.save(folder, self.model, self.optimizer, scaler=self.scaler, scheduler=self.schedule, **more)

    def load(self, source: Path) -> None:
        """Collective. Resume from a checkpoint, or from the newest whole one of a folder."""
        with warnings.catch_warnings(record=True) as caught:
            loaded = checkpoint.load(source, self.model, self.optimizer, scaler=self.scaler, scheduler=self.schedule)
        for line in (*(str(warning.message) for warning in caught), *loaded.notes):
            say(line)
        self.steps_done = loaded.step


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def train(given: Flags, resume: Path | None, command: str) -> int:
    """Train. Returns the exit code: 0, or 130 when interrupted. Raises UsageError, on every rank alike.

    ``resume``: a run directory or checkpoint; ``RESUME_AUTO``: ``given["out"]`` if that holds a checkpoint.
    ``command``: what was typed.
    """
    device = choose_device(given.get("device"), local_ranks())
    with join_ranks(device) as comm:
        asked_to_stop = watch_signals()
        config, corpus, source = together(comm, lambda: _read_inputs(given, resume, device), "reading flags and text")
        dated = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.dtype}-stage{config.stage}"
        out = Path(given.get("out") or (run_of(source) if source else dated)).absolute()  # the process may go elsewhere
        # Rank 0's clock names the folder.
        folder = on_rank_0(comm, lambda: open_run(out, source, overwrite=resume == RESUME_AUTO), "making the folder")
        trainer = Trainer(config, corpus, comm)
        try:
            if source:
                trainer.load(source)
            session = _describe(trainer, command, source)
            if comm.rank == 0:
                rewind(folder, trainer.steps_done)
            say(*(f"{name:<6} {session['facts'][name]}" for name in ("model", "data", "ranks")))
            resumed = f", after step {trainer.steps_done}" if source else ""
            say(f"run    {folder}, process {os.getpid()}{resumed}")
            if trainer.steps_done < config.steps:
                return _train_on(trainer, folder, session, asked_to_stop)
            say(f"all {config.steps} steps are done; a larger --steps goes on")
            return 0
        finally:
            trainer.optimizer.close()


def _read_inputs(given: Flags, resume: Path | None, device: str) -> tuple[TrainConfig, Corpus, Path | None]:
    """Read flags, checkpoint and text. The third result is a checkpoint, or a folder of them. Raises UsageError."""
    auto = resume == RESUME_AUTO
    source = find_checkpoint(Path(given["out"] if auto else resume).absolute()) if resume else None
    if resume and not source and not auto:
        raise UsageError(f"--resume {resume}: holds no complete checkpoint")
    saved = checkpoint.info(source).extra if source else None
    if source and not (isinstance(saved, dict) and "config" in saved):
        raise UsageError(f"--resume {resume}: was not written by zero-optim train")
    config = resumed_config(saved["config"], given, device) if saved else fresh_config(given, device)
    if not saved and config.dtype != given.get("dtype", TrainConfig.dtype):
        say(f"{config.dtype}: no bf16 units in this {device.upper()}; --dtype bf16 emulates them, slowly")
    say("reading the text")
    corpus = load_corpus(config.data, config.seq)
    if saved and saved["data_digest"] != corpus.digest:
        what = f"{corpus.name} is not the text that it was trained on; name that by --data"
        raise UsageError(f"--resume {resume}: {what}")
    return config, corpus, source


def _describe(trainer: Trainer, command: str, source: Path | None) -> dict[str, Any]:
    """Make ``run.json`` as it is until the end of the run.

    ``after_step``: the step that was resumed from, 0 for a fresh run. ``plan``: by formula, bytes of the mean rank by
    kind, and bytes that it communicates in a step by collective.
    """
    config, text, ranks = trainer.config, trainer.corpus, trainer.comm.world_size
    planned = memory.plan_of(trainer.optimizer, mean=True, accumulate=config.accumulate)
    shape = f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, window of {config.seq} bytes"
    each = f"{torch.get_num_threads()} threads" if config.device == "cpu" else torch.cuda.get_device_name()
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    return {
        "started": datetime.now().astimezone().isoformat(),
        "after_step": trainer.steps_done,
        "resumed_from": str(run_of(source)) if source else None,
        "command": command,
        "facts": {
            "model": f"{planned.model.numel:,} parameters in {config.dtype}: {shape}",
            "data": f"{text.name}: {text.train.numel():,} bytes to train on, {text.validation.numel():,} held out",
            "ranks": f"{ranks} on {config.device} ({backend}, {each}), stage {config.stage}",
            **{"zero-optim": distribution_version(), "torch": torch.__version__, "python": platform.python_version()},
        },
        "config": asdict(config),
        "parameters": planned.model.numel,
        "peak_of": "allocated by torch on a GPU" if config.device == "cuda" else "resident memory of a process",
        "plan": {"memory": {**planned.memory}, "traffic": {**planned.traffic}, "state_kinds": planned.state_kinds},
        "ending": None,
    }


def _train_on(trainer: Trainer, folder: Path, session: Session, asked_to_stop: Callable[[], bool]) -> int:
    """Run the steps that are left, or until a rank is asked to stop, and save. Returns the exit code."""
    config, begun, leads, stopped = trainer.config, time.perf_counter(), trainer.comm.rank == 0, False
    if leads:
        write_atomically(folder / RUN, json.dumps(session, indent=1))
    log_of_run = open_log(folder, trainer.steps_done, config.steps) if leads else contextlib.nullcontext()
    with trainer.tracker, log_of_run as log:
        while not stopped and trainer.steps_done < config.steps:
            record, stopped = trainer.step(asked_to_stop=asked_to_stop())
            if log:
                log(record)
            due = config.save_every and trainer.steps_done % config.save_every == 0
            if config.checkpoint and (due or stopped or trainer.steps_done == config.steps):
                trainer.save(folder / CHECKPOINTS)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    report = {
        "memory": dict(trainer.tracker.peak),  # the most bytes of each kind, not all at one time
        "collectives": trainer.optimizer.stats()["collectives"],
        "seconds": dict(trainer.seconds),
        "steps": trainer.steps_done - session["after_step"],
        "peak_bytes": torch.cuda.max_memory_allocated() if trainer.device.type == "cuda" else resident,
    }
    finished = trainer.steps_done == config.steps
    ending: dict[str, Any] = {
        "step": trainer.steps_done,
        "seconds": time.perf_counter() - begun,
        "ranks": trainer.comm.gather_objects(report, "the last report"),
        "outcome": "finished" if finished else "interrupted",
    }
    if finished:
        ending["validation_loss"] = _finite(_validate(trainer, folder))
        ending["entropy"] = unigram_entropy(trainer.corpus.validation)
    if leads:
        session = {**session, "ending": ending}
        write_atomically(folder / RUN, json.dumps(session, indent=1))
        _print_end(session, folder)
    return 0 if finished else INTERRUPTED


@torch.no_grad()
def _validate(trainer: Trainer, folder: Path) -> float:
    """Collective. Mean loss in nats per byte over fixed windows of the held-out text; rank 0 writes a sample."""
    say("validating and sampling")
    model, config, comm, text = trainer.model, trainer.config, trainer.comm, trainer.corpus.validation
    windows = fixed_windows(text, config.seq, _VALIDATION_WINDOWS)
    if even := len(windows) - len(windows) % comm.world_size:  # as many for each: at stage 3 every forward gathers
        windows = windows[comm.rank : even : comm.world_size]
    parts = windows.to(trainer.device).split(config.batch)
    loss = torch.stack([next_byte_loss(model, part).double() * len(part) for part in parts]).sum()
    comm.exchange(loss)
    with gather_parameters(model):
        if comm.rank == 0:
            sample = generate(model, text[:_PROMPT].long(), _SAMPLE_LENGTH, seed=config.seed)
            (folder / "sample.txt").write_bytes(bytes(sample.tolist()))
    return loss.item() / len(windows) / comm.world_size


def _print_end(session: Session, folder: Path) -> None:
    """Write page and picture, and print the tables and losses."""
    ending, page = session["ending"], write_page(folder)
    if ending["outcome"] == "interrupted":
        go_on = f"go on with --resume {folder}" if session["config"]["checkpoint"] else "nothing was saved"
        say(f"interrupted after step {ending['step']}; {go_on}")
        return
    say("", "\n\n".join(table.as_text() for table in tables(session)), "")
    if not (folder / PICTURE).exists():
        say(f"{PICTURE} was not written: matplotlib is not installed; pip install zero-kernels[train]")
    loss = ending["validation_loss"]
    say(f"validation loss {'not finite' if loss is None else f'{loss:.4f}'}")
    say(f"unigram entropy {ending['entropy']:.4f}")
    say("  nats per byte of held-out text; the entropy is of that text's own byte counts")
    say(f"page of the run: {page}", f"written to {folder}")


# -- text as bytes: finding it, splitting it into training and validation, and drawing windows by step number ----------


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, uint8 ``[bytes]`` each; ``digest`` is a SHA-256 of both."""

    name: str
    train: Tensor
    validation: Tensor
    digest: str


def load_corpus(path: str | None, seq: int) -> Corpus:
    """Read a file, a folder, or (None) the source of the Python standard library.

    A folder is split by file, a single file by position. Hidden files and folders are left out. Raises UsageError for a
    path that is unreadable, empty, or too small for one window of ``seq`` + 1 bytes on either side of the split.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    files = [root]
    if root.is_dir():
        files = [*_files_below(root, _SKIPPED)] if path else [*_files_below(root, _SKIPPED_IN_STDLIB, ".py")]
    try:
        texts = [(file.relative_to(root).as_posix(), text) for file in files if (text := file.read_bytes())]
    except OSError as error:
        raise UsageError(f"--data {error.filename}: {error.strerror}") from error
    if not texts:
        raise UsageError(f"--data {root}: empty, no byte to train on")
    parts = split(texts)
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) < seq + 1:
            few = f"{len(part)} bytes of {name} text, fewer than one window of {seq + 1}"
            raise UsageError(f"--data {root}: {few}; give more text or a smaller --seq")
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    train, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Corpus(path or f"Python standard library, {root}", train, validation, digest)


def _files_below(root: Path, skipped: set[str], suffix: str = "") -> Iterator[Path]:
    """Find regular, visible files, in any order."""
    for folder, folders, names in os.walk(root):
        # In place: os.walk enters the folders that are left in its list.
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        files = (Path(folder, name) for name in names if name[0] != "." and name.endswith(suffix))
        yield from (file for file in files if file.is_file())


def split(texts: Sequence[tuple[str, bytes]]) -> tuple[bytearray, bytearray]:
    """Split named texts into training bytes and a tenth of validation bytes, by the SHA-256 of the names.

    So whole texts are held out, but for one that both sides have a part of: of a single text validation has the tail.
    """
    ordered = sorted(texts, key=lambda item: hashlib.sha256(item[0].encode()).digest(), reverse=True)
    text = bytearray().join(text for _, text in ordered)
    cut = len(text) - len(text) // 10
    return text[:cut], text[cut:]


def draw_windows(text: Tensor, seq: int, numbers: range, *, seed: int, step: int) -> Tensor:
    """Draw random windows ``[len(numbers), seq + 1]`` int64. ``numbers``: of a step's, over ranks and micro-batches."""
    # A hash, and no generator's state: any number of ranks draws the same windows, and a resumed run replays nothing.
    keys = (hashlib.sha256(f"{seed}/{step}/{number}".encode()).digest() for number in numbers)
    starts = [int.from_bytes(key[:8], "little") % (text.numel() - seq) for key in keys]
    return text[torch.tensor(starts)[:, None] + torch.arange(seq + 1)].long()


def fixed_windows(text: Tensor, seq: int, count: int) -> Tensor:
    """Cut out at most ``count`` windows ``[n, seq + 1]`` int64, evenly spaced and never overlapping."""
    count = max(1, min(count, text.numel() // (seq + 1)))
    starts = torch.arange(count) * (text.numel() - seq - 1) // max(1, count - 1)
    return text[starts[:, None] + torch.arange(seq + 1)].long()


def unigram_entropy(text: Tensor) -> float:
    """Entropy in nats per byte of the text's own byte counts: no model that ignores context can do better on it."""
    counts = torch.bincount(text, minlength=256).double()
    return torch.special.entr(counts / counts.sum()).sum().item()
