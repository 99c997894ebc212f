"""Programs of checkpoints: one job trains and saves, another one loads, and what it has then is as docs/checkpoint.md
says, bit for bit. ``repr`` of a program, evaluated with the names of this module, is the program again.

What a job has is one dictionary of whole tensors and plain values by key, the same for every stage. A strict load
refuses other keys, any load refuses other shapes, and a load that is not strict takes the keys that both have.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
IN_BF16 = ("bf16", "bf16_stochastic")  # forms of state; what is loaded into either is rounded to nearest

Seen = dict[tuple[Any, ...], Any]  # see Running.observe


@dataclass(frozen=True)
class Weight:
    """``name``: in the root, or ``units.0.<name>``; ``tied``: a second name, in a later module. ``used``: always,
    never, odd (in every other step) or ranks (on every other rank, in turns). ``wide``: fp32, whatever the job's dtype."""

    name: str
    shape: tuple[int, ...]
    used: str = "always"
    trained: bool = True
    wide: bool = False
    tied: str = ""

    def names(self) -> list[str]:
        return [self.name, self.tied] if self.tied else [self.name]


@dataclass(frozen=True)
class Buffer:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Group:
    names: tuple[str, ...]
    lr: float = 1e-2
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A model with its optimizer. The first weight is used by all ranks in each step. ``rule``: sharded, or adamw for
    torch's. ``master``, ``state_dtype``: the form of the state of a sharded one."""

    weights: tuple[Weight, ...]
    groups: tuple[Group, ...]
    buffers: tuple[Buffer, ...] = ()
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
    """``source`` trains and saves on ``saving`` ranks, and ``target`` loads it on ``loading`` ranks. ``stepped``: after a
    step of its own. ``with_opt``: load is given its optimizers."""

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
    """``model(total, gradients, salt)`` adds terms with these gradients, by name; buffers change by ``salt``."""

    def __init__(self, plan: Plan, seed: int, at: str = "") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for weight in plan.weights:
            if _module_of(weight.name) == at:
                dtype = torch.float32 if weight.wide else getattr(torch, plan.dtype)
                value = torch.randn(weight.shape, generator=generator).to(dtype)
                self.register_parameter(weight.name.removeprefix(at), nn.Parameter(value, weight.trained))
        for buffer in plan.buffers:
            if _module_of(buffer.name) == at:
                value = (torch.randn(buffer.shape, generator=generator) * 9).abs().to(getattr(torch, buffer.dtype))
                self.register_buffer(buffer.name.removeprefix(at), value)
        if not at:
            self.units = nn.ModuleList(Unit(plan, seed + 1 + unit, f"units.{unit}.") for unit in range(2))
            for weight in plan.weights:
                if weight.tied:
                    other = self.get_submodule(_module_of(weight.tied)[:-1])
                    other.register_parameter(weight.tied.rpartition(".")[2], self.get_parameter(weight.name))

    def forward(self, total: Tensor, gradients: dict[str, Tensor], salt: int) -> Tensor:
        for number, unit in enumerate(getattr(self, "units", ())):
            at = f"units.{number}."
            own = {name.removeprefix(at): g for name, g in gradients.items() if name.startswith(at)}
            total = unit(total, own, salt)
        for name in list(self._parameters):
            if name in gradients:
                total = total + (getattr(self, name).float() * gradients[name]).sum()
        with torch.no_grad():
            for buffer in self._buffers.values():
                buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + salt % 7 + 1)
        return total * 1.0


class Unit(Model):
    """Of stage 3."""


def _module_of(name: str) -> str:
    """With a dot at its end; empty for the root."""
    at, dot, _ = name.rpartition(".")
    return at + dot


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

    def close(self) -> None:
        for opt in self.opts:
            if hasattr(opt, "close"):
                opt.close()

    def given(self) -> dict[str, Any]:
        """What save and load are given beside the model."""
        return {
            "opt": self.opts if len(self.opts) > 1 else self.opts[0],
            "scaler": self.scaler,
            "scheduler": self.scheduler,
        }

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
            self._edit(step.edited)

    def _edit(self, names: Sequence[str]) -> None:
        """Writes into parameters, the same on every rank."""
        with torch.no_grad(), zero_optim.gather_parameters(self.model, writeback=True):
            for name, parameter in self.model.named_parameters():
                if name in names:
                    flat = parameter.view(-1)
                    flat[::2] = flat[::2] * 1.5 + 0.25

    def observe(self) -> Seen:
        """What there is: ("parameter", name), ("buffer", name), ("state", optimizer, name) of parameters that were
        updated, ("group", optimizer, names), ("scheduler",), ("scaler",), and ("random",) of this rank."""
        seen: Seen = {}
        with zero_optim.gather_parameters(self.model):
            seen |= {("parameter", name): p.detach().clone() for name, p in self.model.named_parameters()}
        seen |= {("buffer", name): b.detach().clone() for name, b in self.model.named_buffers()}
        for number, (opt, plan) in enumerate(zip(self.opts, self.job.plans, strict=True)):
            state = zero_optim.full_state_dict(opt, rank=None) if plan.sharded else opt.state_dict()
            names = [self.job.prefix(number) + name for group in plan.groups for name in group.names]
            for index, entry in state["state"].items():
                if float(entry["step"]) > 0:
                    seen["state", number, names[index]] = {k: v.detach().clone() for k, v in entry.items()}
            left_out = ("params", "param_names", "decoupled_weight_decay")  # the last: what AdamW is to Adam
            for group, options in zip(plan.groups, opt.param_groups, strict=True):
                key = "group", number, frozenset(group.names)
                seen[key] = {option: value for option, value in options.items() if option not in left_out}
        for key, one in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if one is not None:
                seen[key,] = dict(one.state_dict())
        kind, values, *rest = numpy.random.get_state()
        seen["random",] = [torch.get_rng_state(), random.getstate(), (kind, values.tolist(), *rest)]
        return seen


def _optimizer(plan: Plan, model: Model) -> Any:
    if plan.sharded and plan.stage == 3:
        zero_optim.shard_module(model, units=(Unit,))
    own = dict(model.named_parameters())
    groups = [
        {"params": [(n, own[n]) for n in g.names], "lr": g.lr, "weight_decay": g.weight_decay} for g in plan.groups
    ]
    if not plan.sharded:
        return torch.optim.AdamW(groups)
    options: dict[str, Any] = {} if plan.stage == 3 else {"stage": plan.stage}
    options |= {} if plan.stage == 3 or plan.cap is None else {"bucket_cap_mb": plan.cap}
    return zero_optim.ShardedAdamW(groups, master=plan.master, state_dtype=plan.state_dtype, **options)


def _gradients(plan: Plan, salt: int, rank: int) -> dict[str, Tensor]:
    found = {}
    pairs = [(name, weight) for weight in plan.weights for name in weight.names()]
    for index, (name, weight) in enumerate(pairs):
        seed = (salt * 8 + rank) * 100 + index
        used = {"always": True, "never": False, "odd": salt // 10 % 2 == 1, "ranks": (salt // 10 + rank) % 2 == 0}
        if used[weight.used] and weight.trained:
            found[name] = torch.randint(-16, 17, weight.shape, generator=torch.Generator().manual_seed(seed)) / 64
    return found


# -- the two halves of a program, on a rank ----------------------------------------------------------------------------

TAIL = (Step(clip=True), Step(micro=2))  # after a checkpoint
Entries = list[tuple[Any, ...]]  # what happened, what was seen then, and more


def save(rank: int, world: int, program: Program, folder: str) -> Entries:
    running = Running(program.source, program.seed, rank)
    for number, step in enumerate(program.steps):
        running.train(number, step)
    found: Entries = [("before", running.observe())]
    checkpoint.save(folder, running.model, **running.given(), step=program.seed, extra={"seed": program.seed})
    return [*found, ("saved", running.observe()), *_go_on(program, running)]


def load(rank: int, world: int, program: Program, folder: str) -> Entries:
    """Strictly, and where that is refused, not strictly."""
    running = Running(program.target, program.seed + 5000, rank)
    if program.stepped:
        running.train(50, Step())
    found: Entries = [("before", running.observe())]
    for strict in (True, False):
        try:
            loaded = checkpoint.load(
                folder, running.model, **running.given() if program.with_opt else {}, strict=strict
            )
        except StateMismatchError as error:
            found.append(("refused", running.observe(), str(error)))
        else:
            found.append(("loaded", running.observe(), (loaded.step, loaded.extra), loaded.notes))
            break
    return [*found, *_go_on(program, running)]


def _go_on(program: Program, running: Running) -> Entries:
    """Where the target is as the source was. If it is on another number of ranks, all have the same gradients, on which
    any number of ranks agrees."""
    found: Entries = []
    if program.goes_on:
        for number, step in enumerate(TAIL):
            running.train(10 + number, step, alike=program.saving != program.loading)
        found.append(("later", running.observe()))
    running.close()
    return found


def check(program: Program, load: Callable[..., Entries] = load) -> None:
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


def wrong(program: Program, saved: Sequence[Entries], loaded: Sequence[Entries]) -> Iterator[str]:
    """What is not as docs/checkpoint.md says; of each rank that saves, and of each that loads."""
    for (_, before), (_, after), *_ in saved:
        yield from _difference("save has changed something", before, after)
    if len({tuple(what for what, *_ in entries) for entries in loaded}) > 1:
        yield "some ranks refuse what others load"
    alike = program.saving == program.loading
    for rank, entries in enumerate(loaded):
        of_rank = {key: value for key, value in saved[0][1][1].items() if key != ("random",)}
        if alike and program.with_opt:
            of_rank["random",] = saved[rank][1][1]["random",]
        yield from _wrong_on_rank(program, of_rank, entries)
        if program.goes_on and not any(what == "refused" for what, *_ in entries):
            yield from _wrong_later(alike, saved[rank if alike else 0][-1][1], entries[-1][1])


def _wrong_on_rank(program: Program, saved: Seen, entries: Entries) -> Iterator[str]:
    before = entries[0][1]
    refused = [entry for entry in entries if entry[0] == "refused"]
    for _, after, _ in refused:
        yield from _difference("a load that was refused has changed something", before, after)
    want, misfits, wrong_shape = law(program, saved, before)
    right = 2 if wrong_shape else 1 if misfits else 0
    reasons = f"{wrong_shape or misfits}, {[text for *_, text in refused]}"
    if len(refused) != right:
        yield f"of a strict load and another, {len(refused)} were refused: {reasons}"
    elif right < 2:
        _, after, values, notes = entries[1 + right]
        if not program.with_opt:  # whether random states are loaded then is left open
            want["random",] = after["random",]
        yield from _difference(f"loaded: {reasons}, {notes}", want, after)
        if values != (program.seed, {"seed": program.seed}):
            yield f"other values: {values}"
        if not notes and (refused or program.saving != program.loading):
            yield "nothing is said of what was not loaded"


def _wrong_later(alike: bool, want: Seen, have: Seen) -> Iterator[str]:
    """All ranks have begun with the buffers of rank 0."""
    if alike:
        yield from _difference("resumed", *({k: v for k, v in s.items() if k[0] != "buffer"} for s in (want, have)))
    for key, value in want.items():
        if key[0] == "parameter" and not torch.allclose(have[key].float(), value.float(), rtol=2e-2, atol=1e-2):
            yield f"resumed on other ranks: {key}"


def _difference(what: str, want: Seen, have: Seen) -> Iterator[str]:
    if want.keys() != have.keys():
        yield f"{what}: not in both: {want.keys() ^ have.keys()}"
    elif found := first_difference(want, have, bits):
        yield f"{what}: {found}"


def law(program: Program, saved: Seen, before: Seen) -> tuple[Seen, list[Any], list[Any]]:
    """What the target has after a load, seen ``before``; why a strict load must raise; why any load must."""
    saved = saved | _second_names(program.source, saved, before)
    if program.with_opt:
        taken = {key for key in before if key[0] != "state" and (key != ("random",) or key in saved)}
        taken |= _states(program.target) & saved.keys()  # of what was never updated there is none, and none is missed
        after = {key: value for key, value in before.items() if key[0] != "state"}
    else:
        saved = {key: value for key, value in saved.items() if key[0] in ("parameter", "buffer")}
        taken = {key for key in before if key[0] in ("parameter", "buffer")}
        after = dict(before)
    both = taken & saved.keys()
    tensors = {key for key in both if key[0] in ("parameter", "buffer")}
    wrong_shape = [key for key in tensors if saved[key].shape != before[key].shape]
    masters = _masters(saved)
    for key in both - {*wrong_shape}:
        after[key] = _converted(program.target, key, saved, before, masters)
    if not program.with_opt:
        for (number, name), master in _masters(after).items():
            after["state", number, name] = after["state", number, name] | {"master": master}
    return after, [*(taken ^ saved.keys())], wrong_shape


def _second_names(source: Job, saved: Seen, before: Seen) -> Seen:
    """Where a tie is gone, both names get the saved value."""
    found = {}
    for number, plan in enumerate(source.plans):
        for weight in plan.weights:
            name, second = (("parameter", source.prefix(number) + n) for n in (weight.name, weight.tied))
            if weight.tied and second in before:
                found[second] = saved[name]
    return found


def _states(target: Job) -> set[tuple[Any, ...]]:
    """What a state is loaded for. An optimizer of torch's takes that of a frozen parameter, too."""
    return {
        ("state", number, target.prefix(number) + weight.name)
        for number, plan in enumerate(target.plans)
        for weight in plan.weights
        if weight.trained or not plan.sharded
    }


def _masters(seen: Seen) -> dict[tuple[Any, ...], Tensor]:
    """By optimizer and name. Where a parameter is not its master's rounding it was edited, and the edit holds."""
    return {
        key[1:]: settled(entry["master"], seen["parameter", key[2]])
        for key, entry in seen.items()
        if key[0] == "state" and "master" in entry
    }


def _converted(target: Job, key: tuple[Any, ...], saved: Seen, before: Seen, masters: dict[Any, Tensor]) -> Any:
    kind, value = key[0], saved[key]
    if kind == "parameter":
        by_name = {name: master for (_, name), master in masters.items()}
        return value if value.dtype == before[key].dtype else by_name.get(key[1], value).to(before[key].dtype)
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
        found["master"] = masters.get(key[1:], saved["parameter", key[2]].float())
    return found
