"""Programs of checkpoints: one job trains and saves, another one loads, and what it has then is as docs/checkpoint.md
says, bit for bit. ``repr`` of a program, evaluated with the names of this module, is the program again.

What a job has is one dictionary of whole tensors and plain values by key, the same for every stage. A strict load
refuses other keys, any load refuses other shapes, and a load that is not strict takes the keys that both have.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import zero_optim
from compare import bits, first_difference
from harness import RankFailure, run_ranks
from torch import Tensor, nn
from zero_optim import StateMismatchError, checkpoint

from random_programs.plain import settled
from random_programs.run import COLLECTIVE_SECONDS, SECONDS

IN_BF16 = ("bf16",)  # forms of state; what is loaded into either is rounded to nearest

Seen = dict[tuple[Any, ...], Any]  # see Running.observe
RANDOM = ("random",)  # its key


@dataclass(frozen=True)
class Weight:
    """``name``: in the root, or ``units.0.<name>``; ``tied``: a second name, in a later module. ``used``: always,
    never, odd (in every other step) or ranks (on every other rank, in turns). ``wide``: of fp32 in any job."""

    name: str
    shape: tuple[int, ...]
    used: str = "always"
    trained: bool = True
    wide: bool = False
    tied: str = ""


@dataclass(frozen=True)
class Buffer:
    name: str
    shape: tuple[int, ...]
    dtype: str = ""  # the job's


@dataclass(frozen=True)
class Job:
    """A model with its optimizer. The first weight is used by all ranks in each step. ``groups``: names of weights; the
    ``lr`` of the second group is twice that of the first, and so on. ``master``, ``state_dtype``: the form of the
    state."""

    weights: tuple[Weight, ...]
    groups: tuple[tuple[str, ...], ...]
    buffers: tuple[Buffer, ...] = ()
    lr: float = 1e-2
    stage: int = 2
    cap: float | None = None
    dtype: str = "float32"
    master: str = "fp32"
    state_dtype: str = "fp32"
    scheduler: bool = False
    scaler: bool = False

    def ties(self) -> list[tuple[str, str]]:
        return [(weight.name, weight.tied) for weight in self.weights if weight.tied]


@dataclass(frozen=True)
class Step:
    """``micro`` backwards and an update. ``overflow``: rank 0 has an inf, and all skip it. ``edited``: the parameters
    that are written into afterwards."""

    micro: int = 1
    overflow: bool = False
    clip: bool = False
    edited: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """``source`` trains and saves on ``saving`` ranks, and ``target`` loads it on ``loading`` ranks. ``stepped``: after
    a step of its own. ``with_opt``: load is given its optimizer."""

    seed: int  # of values
    saving: int
    loading: int
    source: Job
    target: Job
    steps: tuple[Step, ...] = ()
    stepped: bool = False
    with_opt: bool = True

    @property
    def goes_on(self) -> bool:
        """Whether both train on after the checkpoint."""
        return self.with_opt and self.target == self.source


# -- jobs --------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """``model(total, gradients, salt)`` adds terms with these gradients, by name; ``salt`` changes buffers. ``at``:
    what the names of its weights begin with; empty for the root, which has two units."""

    def __init__(self, job: Job, seed: int, at: str = "") -> None:
        super().__init__()
        self.at = at
        generator = torch.Generator().manual_seed(seed)
        for one in (*job.weights, *job.buffers):
            module, dot, name = one.name.rpartition(".")
            value = torch.randn(one.shape, generator=generator)
            if module + dot != at:
                continue
            if isinstance(one, Buffer):
                self.register_buffer(name, (value * 9).abs().to(getattr(torch, one.dtype or job.dtype)))
            else:
                value = value if one.wide else value.to(getattr(torch, job.dtype))
                self.register_parameter(name, nn.Parameter(value, one.trained))
        self.units = nn.ModuleList(Unit(job, seed, f"units.{unit}.") for unit in range(0 if at else 2))
        for first, second in () if at else job.ties():
            module, _, name = second.rpartition(".")
            self.get_submodule(module).register_parameter(name, self.get_parameter(first))

    def forward(self, total: Tensor, gradients: dict[str, Tensor], salt: int) -> Tensor:
        for unit in self.units:
            total = unit(total, gradients, salt)
        for name in list(self._parameters):
            if self.at + name in gradients:
                total = total + (getattr(self, name).float() * gradients[self.at + name]).sum()
        with torch.no_grad():
            for buffer in self._buffers.values():
                buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + salt % 7 + 1)
        return total * 1.0


class Unit(Model):
    """Of stage 3."""


class Running:
    """A job's model and optimizer on this rank. Collective, as are its methods."""

    def __init__(self, job: Job, seed: int, rank: int) -> None:
        for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
            seeded(8 * seed + rank)
        self.job, self.rank = job, rank
        self.model = Model(job, seed)
        self.opt = _optimizer(job, self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 2, 0.5) if job.scheduler else None
        self.scaler = zero_optim.GradScaler(init_scale=256.0, growth_interval=3) if job.scaler else None

    def given(self) -> dict[str, Any]:
        """What save and load are given beside the model."""
        return {"opt": self.opt, "scaler": self.scaler, "scheduler": self.scheduler}

    def train(self, number: int, step: Step, alike: bool = False) -> None:
        """``alike``: all ranks have the same gradients."""
        rank = 0 if alike else self.rank
        for turn in range(step.micro):
            gradients = _gradients(self.job, number * 10 + turn, rank)
            if step.overflow and rank == self.rank == 0:
                gradients[self.job.weights[0].name].fill_(torch.inf)
            with self.opt.no_sync() if turn < step.micro - 1 else contextlib.nullcontext():
                loss = self.model(torch.zeros(()), gradients, number * 100 + turn * 10 + rank)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            if step.clip:
                self.opt.clip_grad_norm_(1.0)
            self.opt.step()
        self.opt.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if step.edited:
            with torch.no_grad(), zero_optim.gather_parameters(self.model, writeback=True):
                own = dict(self.model.named_parameters())
                for name in step.edited:
                    own[name].view(-1)[::2] += 0.25

    def observe(self) -> Seen:
        """What there is: ("parameter", name), ("buffer", name), ("state", name) of parameters that were updated,
        ("group", names), ("scheduler",), ("scaler",), and ("random",) of this rank."""
        seen: Seen = {}
        with zero_optim.gather_parameters(self.model):
            seen |= {("parameter", name): p.detach().clone() for name, p in self.model.named_parameters()}
        seen |= {("buffer", name): b.detach().clone() for name, b in self.model.named_buffers()}
        names = [name for group in self.job.groups for name in group]
        for index, entry in zero_optim.full_state_dict(self.opt, rank=None)["state"].items():
            if float(entry["step"]) > 0:
                seen["state", names[index]] = {k: v.detach().clone() for k, v in entry.items()}
        for group, options in zip(self.job.groups, self.opt.param_groups, strict=True):
            left_out = ("params", "param_names")
            seen["group", frozenset(group)] = {k: value for k, value in options.items() if k not in left_out}
        for key, one in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if one is not None:
                seen[key,] = dict(one.state_dict())
        kind, values, *rest = numpy.random.get_state()
        seen[RANDOM] = [torch.get_rng_state(), random.getstate(), (kind, values.tolist(), *rest)]
        return seen


def _optimizer(job: Job, model: Model) -> Any:
    if job.stage == 3:
        zero_optim.shard_module(model, units=(Unit,))
    own = dict(model.named_parameters())
    groups = [
        {"params": [(name, own[name]) for name in names], "lr": place * job.lr, "weight_decay": place * 0.1}
        for place, names in enumerate(job.groups, 1)
    ]
    options = {} if job.stage == 3 else {"stage": job.stage, "bucket_cap_mb": job.cap}
    return zero_optim.ShardedAdamW(groups, master=job.master, state_dtype=job.state_dtype, **options)


def _gradients(job: Job, salt: int, rank: int) -> dict[str, Tensor]:
    found = {}
    pairs = [(name, weight) for weight in job.weights for name in (weight.name, weight.tied) if name]
    for index, (name, weight) in enumerate(pairs):
        seed = (salt * 8 + rank) * 100 + index
        used = {"always": True, "never": False, "odd": salt // 10 % 2 == 1, "ranks": (salt // 10 + rank) % 2 == 0}
        if used[weight.used] and weight.trained:
            found[name] = torch.randint(-16, 17, weight.shape, generator=torch.Generator().manual_seed(seed)) / 64
    return found


# -- the two halves of a program, on a rank ----------------------------------------------------------------------------

TAIL = (Step(clip=True), Step(micro=2))  # after a checkpoint


@dataclass
class Half:
    """What a rank has before it saves or loads, after that, and later if it trains on. ``refused``: what it has after
    each load that raised, with the error's text. ``values``: the step and ``extra`` that are loaded, and the notes."""

    before: Seen
    after: Seen = field(default_factory=dict)
    later: Seen = field(default_factory=dict)
    refused: list[tuple[Seen, str]] = field(default_factory=list)
    values: tuple[Any, ...] = ()


def save(rank: int, world: int, program: Program, folder: str) -> Half:
    running = Running(program.source, program.seed, rank)
    for number, step in enumerate(program.steps):
        running.train(number, step)
    half = Half(running.observe())
    checkpoint.save(folder, running.model, **running.given(), step=program.seed, extra={"seed": program.seed})
    half.after = running.observe()
    return _go_on(program, running, half)


def load(rank: int, world: int, program: Program, folder: str) -> Half:
    """Strictly, and where that is refused, not strictly."""
    running = Running(program.target, program.seed + 5000, rank)
    if program.stepped:
        running.train(50, Step())
    half = Half(running.observe())
    given = running.given() if program.with_opt else {}
    for strict in (True, False):
        try:
            loaded = checkpoint.load(folder, running.model, **given, strict=strict)
        except StateMismatchError as error:
            half.refused.append((running.observe(), str(error)))
        else:
            half.after, half.values = running.observe(), (loaded.step, loaded.extra, loaded.notes)
            break
    return _go_on(program, running, half)


def _go_on(program: Program, running: Running, half: Half) -> Half:
    """Where the target is as the source was. If it is on another number of ranks, all have the same gradients, on which
    any number of ranks agrees."""
    if program.goes_on:
        for number, step in enumerate(TAIL):
            running.train(10 + number, step, alike=program.saving != program.loading)
        half.later = running.observe()
    running.opt.close()
    return half


def check(program: Program) -> None:
    """Raise AssertionError where the program does other than it should."""
    limits = {"timeout": SECONDS, "collective_timeout": COLLECTIVE_SECONDS, "one_order": False}
    with tempfile.TemporaryDirectory() as folder:
        try:
            saved = run_ranks(program.saving, save, program, folder, **limits)
            loaded = run_ranks(program.loading, load, program, folder, **limits)
        except RankFailure as failure:
            raise AssertionError(f"{failure}\n{program!r}") from None
    found = next(wrong(program, saved, loaded), None)
    assert found is None, f"{found}\n{program!r}"


# -- the law -----------------------------------------------------------------------------------------------------------


def wrong(program: Program, saved: Sequence[Half], loaded: Sequence[Half]) -> Iterator[str]:
    """What is not as docs/checkpoint.md says; of each rank that saves, and of each that loads."""
    for half in saved:
        yield from _difference("save has changed something", half.before, half.after)
    alike = program.saving == program.loading
    for rank, half in enumerate(loaded):
        own = saved[rank if alike else 0]
        there = saved[0].after | {RANDOM: own.after[RANDOM]}
        if not (alike and program.with_opt):
            del there[RANDOM]
        yield from _wrong_load(program, there, half)
        buffers = {key for key in half.later if key[0] == "buffer"}  # all ranks have begun with those of rank 0
        if alike:
            yield from _difference("resumed", own.later, half.later, buffers)
        for key, value in own.later.items():
            if key[0] == "parameter" and not torch.allclose(half.later[key].float(), value.float(), 2e-2, 1e-2):
                yield f"resumed on other ranks: {key}"


def _wrong_load(program: Program, saved: Seen, half: Half) -> Iterator[str]:
    for after, _ in half.refused:
        yield from _difference("a load that was refused has changed something", half.before, after)
    want, misfits, wrong_shape = law(program, saved, half.before)
    right = 2 if wrong_shape else 1 if misfits else 0
    reasons = f"{wrong_shape or misfits}, {[text for _, text in half.refused]}"
    if len(half.refused) != right:
        yield f"of a strict load and another, {len(half.refused)} were refused: {reasons}"
    elif right < 2:
        step, extra, notes = half.values
        left_open = set() if program.with_opt else {RANDOM}
        yield from _difference(f"loaded: {reasons}, {notes}", want, half.after, left_open)
        if (step, extra) != (program.seed, {"seed": program.seed}):
            yield f"other values: {step}, {extra}"
        if not notes and (right or program.saving != program.loading):
            yield "nothing is said of what was not loaded"


def _difference(what: str, want: Seen, have: Seen, left_out: Collection[Any] = ()) -> Iterator[str]:
    if want.keys() != have.keys():
        yield f"{what}: not in both: {want.keys() ^ have.keys()}"
    elif found := first_difference(*({k: s[k] for k in s.keys() - left_out} for s in (want, have)), bits):
        yield f"{what}: {found}"


def law(program: Program, saved: Seen, before: Seen) -> tuple[Seen, list[Any], list[Any]]:
    """What the target has after a load, seen ``before``; why a strict load must raise; why any load must."""
    saved, masters = dict(saved), _masters(saved)
    for first, second in program.source.ties():
        if ("parameter", second) in before:  # where a tie is gone, both get the saved value
            saved["parameter", second] = saved["parameter", first]
            masters |= {second: masters[first]} if first in masters else {}
    if program.with_opt:
        taken = {key for key in before if key[0] != "state" and (key != RANDOM or key in saved)}
        states = {("state", weight.name) for weight in program.target.weights if weight.trained}
        taken |= states & saved.keys()  # of what was never updated there is none, and none is missed
        after = {key: value for key, value in before.items() if key[0] != "state"}
    else:
        saved = {key: value for key, value in saved.items() if key[0] in ("parameter", "buffer")}
        taken = {key for key in before if key[0] in ("parameter", "buffer")}
        after = dict(before)
    both = taken & saved.keys()
    tensors = {key for key in both if key[0] in ("parameter", "buffer")}
    wrong_shape = [key for key in tensors if saved[key].shape != before[key].shape]
    for key in both - {*wrong_shape}:
        after[key] = _converted(program.target, key, saved, before, masters)
    if not program.with_opt:
        masters = _masters(after)
        for key in [key for key in after if key[0] == "state" and key[1] in masters]:
            after[key] = after[key] | {"master": masters[key[1]]}
    return after, [*(taken ^ saved.keys())], wrong_shape


def _masters(seen: Seen) -> dict[str, Tensor]:
    """By name. Where a parameter is not its master's rounding it was edited, and the edit holds."""
    return {
        key[1]: settled(entry["master"], seen["parameter", key[1]])
        for key, entry in seen.items()
        if key[0] == "state" and "master" in entry
    }


def _converted(target: Job, key: tuple[Any, ...], saved: Seen, before: Seen, masters: dict[str, Tensor]) -> Any:
    kind, value = key[0], saved[key]
    if kind == "parameter":
        return value if value.dtype == before[key].dtype else masters.get(key[1], value).to(before[key].dtype)
    if kind == "buffer":
        return value.to(before[key].dtype)
    if kind == "group":
        return before[key] | value
    if kind != "state":
        return value
    found = {"step": value["step"].float()}
    for name in ("exp_avg", "exp_avg_sq"):
        moment = value[name].to(torch.bfloat16) if target.state_dtype in IN_BF16 else value[name]
        found[name] = moment.float()
    if before["parameter", key[1]].dtype != torch.float32:
        found["master"] = masters.get(key[1], saved["parameter", key[1]].float())
    return found
