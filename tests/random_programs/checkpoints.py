"""Programs of checkpoints: one job trains and saves, another one loads, and what it has then is as docs/checkpoint.md
says, bit for bit. ``repr`` of a program, evaluated with the names of this module, is the program again.

What a job has is one dictionary of whole tensors and plain values by key, the same for every stage. A strict load
refuses other keys, any load refuses other shapes, and a load that is not strict takes the keys that both have.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
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

SECONDS = 30.0  # of half a program, on a busy machine
COLLECTIVE_SECONDS = 10.0
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
class Plan:
    """A model with its optimizer. The first weight is used by all ranks in each step. ``groups``: names of weights; the
    ``lr`` of the second group is twice that of the first, and so on. ``rule``: sharded, or adamw for torch's.
    ``master``, ``state_dtype``: the form of the state of a sharded one."""

    weights: tuple[Weight, ...]
    groups: tuple[tuple[str, ...], ...]
    buffers: tuple[Buffer, ...] = ()
    lr: float = 1e-2
    rule: str = "sharded"
    stage: int = 2
    cap: float | None = None
    dtype: str = "float32"
    master: str = "fp32"
    state_dtype: str = "fp32"

    @property
    def sharded(self) -> bool:
        return self.rule == "sharded"


@dataclass(frozen=True)
class Job:
    """One plan, or two as the modules ``0`` and ``1`` of a ModuleDict, with an optimizer each."""

    plans: tuple[Plan, ...]
    scheduler: bool = False
    scaler: bool = False

    def prefix(self, number: int) -> str:
        return "" if len(self.plans) == 1 else f"{number}."

    def ties(self) -> list[tuple[str, str]]:
        plans = [(self.prefix(number), plan) for number, plan in enumerate(self.plans)]
        return [(pre + w.name, pre + w.tied) for pre, plan in plans for w in plan.weights if w.tied]


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
    a step of its own. ``with_opt``: load is given its optimizers."""

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

    def __init__(self, plan: Plan, seed: int, at: str = "") -> None:
        super().__init__()
        self.at = at
        generator = torch.Generator().manual_seed(seed)
        for one in (*plan.weights, *plan.buffers):
            module, dot, name = one.name.rpartition(".")
            value = torch.randn(one.shape, generator=generator)
            if module + dot != at:
                continue
            if isinstance(one, Buffer):
                self.register_buffer(name, (value * 9).abs().to(getattr(torch, one.dtype or plan.dtype)))
            else:
                value = value if one.wide else value.to(getattr(torch, plan.dtype))
                self.register_parameter(name, nn.Parameter(value, one.trained))
        self.units = nn.ModuleList(Unit(plan, seed, f"units.{unit}.") for unit in range(0 if at else 2))
        for weight in plan.weights:
            if weight.tied and not at:
                module, _, name = weight.tied.rpartition(".")
                self.get_submodule(module).register_parameter(name, self.get_parameter(weight.name))

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
    """A job's modules and optimizers on this rank. Collective, as are its methods."""

    def __init__(self, job: Job, seed: int, rank: int) -> None:
        for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
            seeded(8 * seed + rank)
        self.job, self.rank = job, rank
        self.models = [Model(plan, seed + 100 * number) for number, plan in enumerate(job.plans)]
        self.opts = [_optimizer(plan, model) for plan, model in zip(job.plans, self.models, strict=True)]
        two = nn.ModuleDict({str(number): model for number, model in enumerate(self.models)})
        self.model = two if len(self.models) > 1 else self.models[0]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opts[0], 2, 0.5) if job.scheduler else None
        self.scaler = zero_optim.GradScaler(init_scale=256.0, growth_interval=3) if job.scaler else None

    def given(self) -> dict[str, Any]:
        """What save and load are given beside the model."""
        opt = self.opts if len(self.opts) > 1 else self.opts[0]
        return {"opt": opt, "scaler": self.scaler, "scheduler": self.scheduler}

    def train(self, number: int, step: Step, alike: bool = False) -> None:
        """``alike``: all ranks have the same gradients."""
        for model, opt, plan in zip(self.models, self.opts, self.job.plans, strict=True):
            rank = 0 if alike or not plan.sharded else self.rank
            for turn in range(step.micro):
                gradients = _gradients(plan, number * 10 + turn, rank)
                if step.overflow and plan.sharded and rank == self.rank == 0:
                    gradients[plan.weights[0].name].fill_(torch.inf)
                with opt.no_sync() if plan.sharded and turn < step.micro - 1 else contextlib.nullcontext():
                    loss = model(torch.zeros(()), gradients, number * 100 + turn * 10 + rank)
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if self.scaler is not None:
                self.scaler.step(opt)
                self.scaler.update()
            else:
                if step.clip and plan.sharded:
                    opt.clip_grad_norm_(1.0)
                opt.step()
            opt.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if step.edited:
            with torch.no_grad(), zero_optim.gather_parameters(self.model, writeback=True):
                own = dict(self.model.named_parameters())
                for name in step.edited:
                    own[name].view(-1)[::2] += 0.25

    def observe(self) -> Seen:
        """What there is: ("parameter", name), ("buffer", name), ("state", optimizer, name) of parameters that were
        updated, ("group", optimizer, names), ("scheduler",), ("scaler",), and ("random",) of this rank."""
        seen: Seen = {}
        with zero_optim.gather_parameters(self.model):
            seen |= {("parameter", name): p.detach().clone() for name, p in self.model.named_parameters()}
        seen |= {("buffer", name): b.detach().clone() for name, b in self.model.named_buffers()}
        for number, (opt, plan) in enumerate(zip(self.opts, self.job.plans, strict=True)):
            state = zero_optim.full_state_dict(opt, rank=None) if plan.sharded else opt.state_dict()
            names = [self.job.prefix(number) + name for group in plan.groups for name in group]
            for index, entry in state["state"].items():
                if float(entry["step"]) > 0:
                    seen["state", number, names[index]] = {k: v.detach().clone() for k, v in entry.items()}
            left_out = ("params", "param_names", "decoupled_weight_decay")  # the last: what AdamW is to Adam
            for group, options in zip(plan.groups, opt.param_groups, strict=True):
                key = "group", number, frozenset(group)
                seen[key] = {option: value for option, value in options.items() if option not in left_out}
        for key, one in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if one is not None:
                seen[key,] = dict(one.state_dict())
        kind, values, *rest = numpy.random.get_state()
        seen[RANDOM] = [torch.get_rng_state(), random.getstate(), (kind, values.tolist(), *rest)]
        return seen


def _optimizer(plan: Plan, model: Model) -> Any:
    if plan.sharded and plan.stage == 3:
        zero_optim.shard_module(model, units=(Unit,))
    own = dict(model.named_parameters())
    groups = [
        {"params": [(name, own[name]) for name in names], "lr": place * plan.lr, "weight_decay": place * 0.1}
        for place, names in enumerate(plan.groups, 1)
    ]
    if not plan.sharded:
        return torch.optim.AdamW(groups)
    options: dict[str, Any] = {} if plan.stage == 3 else {"stage": plan.stage}
    options |= {} if plan.stage == 3 or plan.cap is None else {"bucket_cap_mb": plan.cap}
    return zero_optim.ShardedAdamW(groups, master=plan.master, state_dtype=plan.state_dtype, **options)


def _gradients(plan: Plan, salt: int, rank: int) -> dict[str, Tensor]:
    found = {}
    pairs = [(name, weight) for weight in plan.weights for name in (weight.name, weight.tied) if name]
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
    for opt in running.opts:
        getattr(opt, "close", int)()  # torch's have none
    return half


def check(program: Program, load: Callable[..., Half] = load) -> None:
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
        taken |= _states(program.target) & saved.keys()  # of what was never updated there is none, and none is missed
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
        for key in [key for key in after if key[0] == "state" and key[2] in masters]:
            after[key] = after[key] | {"master": masters[key[2]]}
    return after, [*(taken ^ saved.keys())], wrong_shape


def _states(target: Job) -> set[tuple[Any, ...]]:
    """What a state is loaded for. An optimizer of torch's takes that of a frozen parameter, too."""
    return {
        ("state", number, target.prefix(number) + weight.name)
        for number, plan in enumerate(target.plans)
        for weight in plan.weights
        if weight.trained or not plan.sharded
    }


def _masters(seen: Seen) -> dict[str, Tensor]:
    """By name. Where a parameter is not its master's rounding it was edited, and the edit holds."""
    return {
        key[2]: settled(entry["master"], seen["parameter", key[2]])
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
    plan, parameter = target.plans[key[1]], before["parameter", key[2]]
    found = {"step": value["step"].float()}
    for name in ("exp_avg", "exp_avg_sq"):
        moment = value[name].to(torch.bfloat16) if plan.state_dtype in IN_BF16 else value[name]
        found[name] = moment.to(torch.float32 if plan.sharded else parameter.dtype)
    if plan.sharded and parameter.dtype != torch.float32:
        found["master"] = masters.get(key[2], saved["parameter", key[2]].float())
    return found
