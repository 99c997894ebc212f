"""Small jobs drawn from a seed, and the law of ``zero_optim.checkpoint`` for them, written from docs/checkpoint.md.

A job is observed as plain dictionaries of whole tensors, by names that its plan gives, and through nothing of the
package but ``gather_parameters`` and ``full_state_dict``. So the law knows no bucket, no shard and no file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from programs.compare import bits, first_difference
from torch import Tensor, nn
from training_cases import maybe_no_sync

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (0, 3), (5,), (7, 3), (17, 9), (300,), (40, 25), (128,), (2, 1))
BUFFERS = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.int32)
ANCHOR = "anchor"  # a parameter of every model that each backward reaches on every rank
WIDTH = 4  # of a BatchNorm

# -- plans: what a job is, as plain values -------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """``used``: always, never, odd (in every other step) or ranks (on every other rank, in turns). ``wide``: in fp32,
    whatever the dtype of the model."""

    name: str
    shape: tuple[int, ...]
    used: str = "always"
    trained: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Buffer:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """A module of a model: the last is the root, and the others are units at stage 3. ``norm``: a BatchNorm in it."""

    weights: tuple[Weight, ...]
    buffers: tuple[Buffer, ...] = ()
    norm: bool = False


@dataclass(frozen=True)
class Plan:
    """One model with its optimizer. ``ties``: (part, weight, other part, other name). ``groups``: the local names of
    the parameters in each group, and their options. ``rule``: sharded, or adamw for torch's."""

    parts: tuple[Part, ...]
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]
    ties: tuple[tuple[int, str, int, str], ...] = ()
    rule: str = "sharded"
    stage: int = 2
    cap: float | None = None
    dtype: str = "fp32"

    def local_name(self, part: int, weight: str) -> str:
        return weight if part == len(self.parts) - 1 else f"parts.{part}.{weight}"

    def weights(self) -> dict[str, Weight]:
        """Every parameter once, by the name that ``named_parameters`` gives it."""
        found: dict[str, Weight] = {}
        for number, part in [(len(self.parts) - 1, self.parts[-1]), *enumerate(self.parts[:-1])]:
            for weight in part.weights:
                found[self.local_name(number, weight.name)] = weight
            if part.norm:
                for name in ("norm.weight", "norm.bias"):
                    found[self.local_name(number, name)] = Weight(name, (WIDTH,))
        return found

    def aliases(self) -> dict[str, str]:
        return {self.local_name(b, other): self.local_name(a, name) for a, name, b, other in self.ties}


@dataclass(frozen=True)
class Job:
    """One plan, or two as the modules ``first`` and ``second`` of a ModuleDict, with an optimizer each."""

    plans: tuple[Plan, ...]
    scheduler: bool = False
    scaler: bool = False

    def prefixes(self) -> list[str]:
        return [""] if len(self.plans) == 1 else ["first.", "second."]

    def aliases(self) -> dict[str, str]:
        return {
            pre + other: pre + name
            for pre, plan in zip(self.prefixes(), self.plans, strict=True)
            for other, name in plan.aliases().items()
        }

    def weights(self) -> dict[str, Weight]:
        return {
            pre + name: weight
            for pre, plan in zip(self.prefixes(), self.plans, strict=True)
            for name, weight in plan.weights().items()
        }

    def groups(self) -> list[list[list[str]]]:
        """The names in each group of each optimizer."""
        return [
            [[pre + name for name in names] for names, _ in plan.groups]
            for pre, plan in zip(self.prefixes(), self.plans, strict=True)
        ]


def draw_plan(rng: random.Random, rule: str) -> Plan:
    names = iter(rng.sample(["w", "a:0", "b b", "ü", "x", "weight", "y", "z", "0", "k", "q", "master", "step"], 13))
    used = ("always", "always", "odd", "never") + (("ranks",) if rule == "sharded" else ())

    def a_part(root: bool) -> Part:
        weights = [
            Weight(next(names), rng.choice(SHAPES), rng.choice(used), rng.random() > 0.15, rng.random() < 0.15)
            for _ in range(rng.randint(0 if root else 1, 3))
        ]
        buffers = [Buffer(f"buffer{i}", rng.choice(SHAPES), rng.choice(BUFFERS)) for i in range(rng.randint(0, 2))]
        anchor = [Weight(ANCHOR, (6,))] if root else []
        return Part(tuple(anchor + weights), tuple(buffers), not root and rng.random() < 0.3)

    count = rng.randint(1, 3)
    parts = (*(a_part(False) for _ in range(count)), a_part(True))
    ties = ()
    if rng.random() < 0.5:
        source, target = rng.choice([(count, 0), *((0, n) for n in range(1, count))])
        ties = ((source, parts[source].weights[0].name, target, "tied"),)
    plan = Plan(
        parts,
        (),
        ties,
        rule,
        rng.randrange(4),
        rng.choice([None, 0.0005, 0.002]),
        rng.choice(["fp32", "bf16", "fp16"] if rule == "sharded" else ["fp32", "fp32", "bf16"]),
    )
    return dataclasses.replace(plan, groups=_draw_groups(rng, list(plan.weights())))


def _draw_groups(rng: random.Random, names: list[str]) -> tuple[tuple[tuple[str, ...], dict[str, Any]], ...]:
    rng.shuffle(names)
    cuts = sorted(rng.sample(range(1, len(names)), min(len(names) - 1, rng.randint(0, 2))))
    ends = [0, *cuts, len(names)]
    return tuple(
        (tuple(names[start:end]), {"lr": rng.choice([1e-2, 3e-3]), "weight_decay": rng.choice([0.0, 0.1])})
        for start, end in zip(ends, ends[1:], strict=False)
    )


def draw_job(rng: random.Random) -> Job:
    rules = [rng.choice(["sharded", "sharded", "sharded", "adamw"]) for _ in range(rng.choice([1, 1, 2]))]
    plans = tuple(draw_plan(rng, rule) for rule in rules)
    return Job(plans, rng.random() < 0.3, rules == ["sharded"] and rng.random() < 0.3)


# -- jobs: modules and optimizers made of a plan -------------------------------------------------------------------


class Unit(nn.Module):
    def __init__(self, part: Part, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        fill(self, part, dtype, seed)

    def forward(self, total: Tensor, gradients: Mapping[str, Tensor], salt: int) -> Tensor:
        return total + contribution(self, gradients, salt)


class Model(nn.Module):
    """``model(gradients, salt)`` is a loss whose gradients are those that are given, by name. Buffers change by it."""

    def __init__(self, plan: Plan, seed: int) -> None:
        super().__init__()
        dtype = DTYPES[plan.dtype]
        fill(self, plan.parts[-1], dtype, seed)
        self.parts = nn.ModuleList(Unit(part, dtype, seed + 1 + i) for i, part in enumerate(plan.parts[:-1]))
        for source, name, target, other in plan.ties:
            self._part(target).register_parameter(other, self._part(source)._parameters[name])

    def _part(self, number: int) -> nn.Module:
        return self if number == len(self.parts) else self.parts[number]

    def forward(self, gradients: Mapping[str, Tensor], salt: int) -> Tensor:
        total = torch.zeros(())
        for number, unit in enumerate(self.parts):
            own = {name.split(".", 2)[2]: g for name, g in gradients.items() if name.startswith(f"parts.{number}.")}
            total = unit(total, own, salt)
        return total + contribution(self, gradients, salt)


def fill(module: nn.Module, part: Part, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in part.weights:
        value = torch.randn(weight.shape, generator=generator).to(torch.float32 if weight.wide else dtype)
        module.register_parameter(weight.name, nn.Parameter(value, requires_grad=weight.trained))
    for buffer in part.buffers:
        value = (torch.randn(buffer.shape, generator=generator) * 9).abs().to(buffer.dtype)
        module.register_buffer(buffer.name, value)
    if part.norm:
        module.norm = nn.BatchNorm1d(WIDTH).to(dtype)


def contribution(module: nn.Module, gradients: Mapping[str, Tensor], salt: int) -> Tensor:
    total = torch.zeros(())
    for name in list(module._parameters):
        if name in gradients:
            total = total + (getattr(module, name).float() * gradients[name].float()).sum()
    for name, buffer in module._buffers.items():
        with torch.no_grad():
            module._buffers[name].copy_(~buffer if buffer.dtype == torch.bool else buffer + salt % 7 + 1)
    if hasattr(module, "norm"):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(salt)).to(module.norm.weight.dtype)
        y = module.norm(x).float()
        total = total + (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return total


class Running:
    """A job's modules and optimizers on this rank. Collective, as are its methods."""

    def __init__(self, job: Job, seed: int, rank: int) -> None:
        import zero_optim

        self.job, self.rank = job, rank
        self.models: list[nn.Module] = []
        self.opts: list[Any] = []
        for number, plan in enumerate(job.plans):
            model: nn.Module = Model(plan, seed + 100 * number)
            sharded = plan.rule == "sharded"
            if sharded and plan.stage == 3:
                zero_optim.shard_module(model, units=(Unit,))
            own = dict(model.named_parameters())
            if sharded:
                groups = [{"params": [(n, own[n]) for n in names], **options} for names, options in plan.groups]
                more = {} if plan.stage == 3 else {"stage": plan.stage}
                more |= {} if plan.cap is None or plan.stage == 3 else {"bucket_cap_mb": plan.cap}
                self.opts.append(zero_optim.ShardedAdamW(groups, **more))
            else:
                groups = [{"params": [own[n] for n in names], **options} for names, options in plan.groups]
                self.opts.append(torch.optim.AdamW(groups))
            self.models.append(model)
        self.model = (
            self.models[0]
            if len(self.models) == 1
            else nn.ModuleDict(dict(zip(("first", "second"), self.models, strict=True)))
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opts[0], 2, 0.5) if job.scheduler else None
        self.scaler = zero_optim.GradScaler(init_scale=256.0, growth_interval=3) if job.scaler else None

    def close(self) -> None:
        for opt, plan in zip(self.opts, self.job.plans, strict=True):
            if plan.rule == "sharded":
                opt.close()

    def given(self) -> dict[str, Any]:
        """What save and load are given beside the model."""
        return {
            "opt": self.opts if len(self.opts) > 1 else self.opts[0],
            "scaler": self.scaler,
            "scheduler": self.scheduler,
        }

    def train(self, step: int, alike: bool = False, micro: int = 1, overflow: bool = False, clip: bool = False) -> None:
        """One step. ``alike``: all ranks have the same gradients. ``overflow``: an inf on rank 0, which skips it."""
        for model, opt, plan in zip(self.models, self.opts, self.job.plans, strict=True):
            sharded = plan.rule == "sharded"
            rank = 0 if alike or not sharded else self.rank
            for turn in range(micro):
                gradients = self._gradients(plan, step * 10 + turn, rank)
                if overflow and sharded and rank == self.rank == 0:
                    gradients[ANCHOR] = torch.full_like(gradients[ANCHOR], torch.inf)
                with maybe_no_sync(opt, sharded and turn < micro - 1):
                    loss = model(gradients, step * 100 + turn * 10 + rank)
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if self.scaler is not None:
                self.scaler.step(opt)
                self.scaler.update()
            else:
                if clip and sharded:
                    opt.clip_grad_norm_(1.0)
                opt.step()
            opt.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def _gradients(self, plan: Plan, salt: int, rank: int) -> dict[str, Tensor]:
        found = {}
        names = plan.weights() | {other: plan.weights()[name] for other, name in plan.aliases().items()}
        for index, (name, weight) in enumerate(names.items()):
            seed = (salt * 8 + rank) * 100 + index
            used = {"always": True, "never": False, "odd": salt // 10 % 2 == 1, "ranks": (salt // 10 + rank) % 2 == 0}
            if used[weight.used] and weight.trained:
                found[name] = torch.randint(-16, 17, weight.shape, generator=torch.Generator().manual_seed(seed)) / 64
        return found

    def edit(self, names: Sequence[str]) -> None:
        """Writes into parameters, the same on every rank."""
        import zero_optim

        with torch.no_grad(), zero_optim.gather_parameters(self.model, writeback=True):
            for name, parameter in self.model.named_parameters():
                if name in names:
                    flat = parameter.view(-1)
                    flat[::2] = flat[::2] * 1.5 + 0.25


# -- what is observed ----------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """A job as dictionaries of whole tensors by name, the same for every stage. ``states``: of each optimizer, of the
    parameters that were updated; ``step`` is among the tensors. ``options``: of each group of each optimizer."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    states: list[dict[str, dict[str, Tensor]]]
    options: list[list[dict[str, Any]]]
    random: tuple[Any, ...]
    plain: dict[str, Any] = field(default_factory=dict)


def observe(running: Running) -> Seen:
    """Collective. Every rank sees all, its own buffers and random states."""
    import zero_optim

    with zero_optim.gather_parameters(running.model):
        parameters = {name: p.detach().clone() for name, p in running.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in running.model.named_buffers()}
    states, options = [], []
    for opt, plan, groups in zip(running.opts, running.job.plans, running.job.groups(), strict=True):
        state = zero_optim.full_state_dict(opt, rank=None) if plan.rule == "sharded" else opt.state_dict()
        names = [name for group in groups for name in group]
        states.append(
            {
                names[index]: {key: value.detach().clone() for key, value in entry.items()}
                for index, entry in state["state"].items()
                if float(entry["step"]) > 0
            }
        )
        left_out = ("params", "param_names", "decoupled_weight_decay")  # the last: what AdamW is to Adam
        options.append([{k: v for k, v in group.items() if k not in left_out} for group in opt.param_groups])
    kind, values, *rest = numpy.random.get_state()
    plain = {
        "scheduler": running.scheduler and dict(running.scheduler.state_dict()),
        "scaler": running.scaler and running.scaler.state_dict(),
    }
    states_of_random = (torch.get_rng_state(), random.getstate(), (kind, values.tolist(), *rest))
    return Seen(parameters, buffers, states, options, states_of_random, plain)


def assert_seen(actual: Seen, expected: Seen, what: str, leave_out: Sequence[str] = ()) -> None:
    """Raises AssertionError with where they first differ in bits."""
    names = [f.name for f in dataclasses.fields(Seen) if f.name not in leave_out]
    want, have = ({name: getattr(seen, name) for name in names} for seen in (expected, actual))
    found = first_difference(want, have, bits)
    assert found is None, f"{what}: {found}"


# -- the law -------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """``misfits``: why a strict load must raise, in words; ``wrong_shape``: why any load must. ``after``: what a load
    that does not raise gives. ``unclear``: where a strict load may raise or not, since the page leaves it open: states
    of parameters that were never updated, which torch's optimizers do not make before."""

    misfits: list[str]
    wrong_shape: list[str]
    after: Seen
    unclear: list[str]


def canonical(name: str, saved: Seen, aliases: Mapping[str, str]) -> str | None:
    """The name that a parameter was saved under."""
    if name in saved.parameters:
        return name
    return aliases.get(name)


def judge(
    saved: Seen, source: Job, before: Seen, target: Job, same_world: bool, own_random: Any, with_opt: bool
) -> Verdict:
    """What the load of ``saved``, from the job ``source``, does with the job ``target``, seen ``before``."""
    misfits: list[str] = []
    wrong_shape: list[str] = []
    unclear: list[str] = []
    aliases = source.aliases()
    after = Seen(
        dict(before.parameters),
        dict(before.buffers),
        [dict(state) for state in before.states],
        [[dict(options) for options in groups] for groups in before.options],
        before.random,
        dict(before.plain),
    )
    masters = effective_masters(saved)
    taken = set()
    for name, own in before.parameters.items():
        source_name = canonical(name, saved, aliases)
        if source_name is None:
            misfits.append(f"parameter {name}")
            continue
        taken.add(source_name)
        value = saved.parameters[source_name]
        if value.shape != own.shape:
            wrong_shape.append(name)
        elif value.dtype == own.dtype:
            after.parameters[name] = value
        else:
            after.parameters[name] = masters.get(source_name, value).to(own.dtype)
    misfits += [f"left over parameter {name}" for name in saved.parameters if name not in taken]
    for name, own_buffer in before.buffers.items():
        if name not in saved.buffers:
            misfits.append(f"buffer {name}")
        elif saved.buffers[name].shape != own_buffer.shape:
            wrong_shape.append(name)
        else:
            after.buffers[name] = saved.buffers[name].to(own_buffer.dtype)
    misfits += [f"left over buffer {name}" for name in saved.buffers if name not in before.buffers]
    if with_opt:
        _judge_optimizers(saved, source, before, target, after, misfits, unclear)
        for key in ("scheduler", "scaler"):
            if (saved.plain[key] is None) != (before.plain[key] is None):
                misfits.append(key)
            elif saved.plain[key] is not None:
                after.plain[key] = saved.plain[key]
        if same_world:
            after.random = own_random
    else:
        for state in after.states:
            for name, entry in state.items():
                if "master" in entry:
                    state[name] = {**entry, "master": settled(entry["master"], after.parameters[name])}
    return Verdict(misfits, wrong_shape, after, unclear)


def effective_masters(saved: Seen) -> dict[str, Tensor]:
    """The masters, and where one does not round to its parameter, which was edited then, the parameter."""
    found = {}
    for state in saved.states:
        for name, entry in state.items():
            if "master" in entry:
                found[name] = settled(entry["master"], saved.parameters[name])
    return found


def settled(master: Tensor, parameter: Tensor) -> Tensor:
    """What the master is, at the latest in the next step, as docs/step.md has it: an edit of the parameter wins."""
    return torch.where(master.to(parameter.dtype) == parameter, master, parameter.float())


def _judge_optimizers(
    saved: Seen, source: Job, before: Seen, target: Job, after: Seen, misfits: list[str], unclear: list[str]
) -> None:
    aliases = source.aliases()
    if len(saved.states) != len(before.states):
        misfits.append("number of optimizers")
    weights, source_weights, masters = target.weights(), source.weights(), effective_masters(saved)
    for number, (groups, state) in enumerate(zip(target.groups(), after.states, strict=True)):
        state.clear()
        if number >= len(saved.states):
            continue
        theirs, entries = source.groups()[number], saved.states[number]
        loaded = set()
        for name in (name for group in groups for name in group):
            source_name = canonical(name, saved, aliases)
            if not weights[name].trained or source_name is None:
                continue
            makes_state = "sharded" in (source.plans[number].rule, target.plans[number].rule)
            was_trained = source_weights[source_name].trained and source.plans[number].rule == "sharded"
            if not any(source_name in group for group in theirs):
                misfits.append(f"state of {name}")
            elif source_name not in entries and makes_state and not was_trained:
                unclear.append(f"state of {name}")
            loaded.add(source_name)
            if source_name in entries:
                entry = {
                    **entries[source_name],
                    "master": masters.get(source_name, saved.parameters[source_name].float()),
                }
                state[name] = _converted(entry, after.parameters[name], target.plans[number].rule)
        misfits += [f"left over state of {name}" for name in entries if name not in loaded]
        if len(groups) != len(theirs):
            misfits.append(f"number of groups of optimizer {number}")
        left = {
            place: {canonical(name, saved, aliases) or name for name in group} for place, group in enumerate(theirs)
        }
        for place, group in enumerate(groups):
            mapped = {canonical(name, saved, aliases) or name for name in group}
            if match := [other for other, names in left.items() if names == mapped]:
                after.options[number][place] |= saved.options[number][match[0]]
                del left[match[0]]
            else:
                misfits.append(f"group {place} of optimizer {number}")


def _converted(entry: Mapping[str, Tensor], parameter: Tensor, rule: str) -> dict[str, Tensor]:
    """The state of one parameter as the target keeps it: torch's moments have the dtype of the parameter."""
    found = {"step": entry["step"].float()}
    moments = torch.float32 if rule == "sharded" else parameter.dtype
    for kind in ("exp_avg", "exp_avg_sq"):
        found[kind] = entry[kind].to(moments)
    if rule == "sharded" and parameter.dtype != torch.float32:
        found["master"] = entry["master"]
    return found


# -- changes: how the job that loads differs from the one that saved -----------------------------------------------


def rescaled(rng: random.Random, job: Job, dtypes: bool = True) -> Job:
    """The same job at another stage, cap, dtype, and order within groups."""
    plans = []
    for plan in job.plans:
        groups = tuple((tuple(rng.sample(names, len(names))), options) for names, options in plan.groups)
        rule = rng.choice(["sharded", "sharded", plan.rule])
        rule = plan.rule if job.scaler or any(w.used == "ranks" for w in plan.weights().values()) else rule
        plans.append(
            dataclasses.replace(
                plan,
                rule=rule,
                stage=rng.randrange(4),
                cap=rng.choice([None, 0.0005, 0.002]),
                dtype=rng.choice(list(DTYPES)) if dtypes else plan.dtype,
                groups=groups,
            )
        )
    return dataclasses.replace(job, plans=tuple(plans))


def _with_part(plan: Plan, number: int, change: Callable[[Part], Part]) -> Plan:
    return dataclasses.replace(
        plan, parts=tuple(change(part) if i == number else part for i, part in enumerate(plan.parts))
    )


def _in_groups(plan: Plan, keep: Callable[[str], bool], more: Sequence[str] = ()) -> Plan:
    groups = [[[n for n in names if keep(n)], options] for names, options in plan.groups]
    groups[-1][0] += more
    return dataclasses.replace(plan, groups=tuple((tuple(names), o) for names, o in groups if names))


def grown(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    if any(weight.name == "new" for weight in plan.parts[number].weights):
        return plan
    plan = _with_part(
        plan, number, lambda p: dataclasses.replace(p, weights=(*p.weights, Weight("new", rng.choice(SHAPES))))
    )
    return _in_groups(plan, lambda name: True, [plan.local_name(number, "new")])


def shrunk(rng: random.Random, plan: Plan) -> Plan:
    choices = [
        (number, weight)
        for number, part in enumerate(plan.parts)
        for weight in part.weights
        if weight.name != ANCHOR and all((number, weight.name) != (a, name) for a, name, _, _ in plan.ties)
    ]
    if not choices:
        return plan
    number, gone = rng.choice(choices)
    plan = _with_part(plan, number, lambda p: dataclasses.replace(p, weights=tuple(w for w in p.weights if w != gone)))
    return _in_groups(plan, lambda name: name != plan.local_name(number, gone.name))


def frozen_or_thawed(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    if not plan.parts[number].weights:
        return plan
    chosen = rng.choice(plan.parts[number].weights)
    if chosen.name == ANCHOR or (chosen.trained and plan.rule == "adamw"):  # the second has a test of its own
        return plan
    other = dataclasses.replace(chosen, trained=not chosen.trained)
    return _with_part(
        plan, number, lambda p: dataclasses.replace(p, weights=tuple(other if w == chosen else w for w in p.weights))
    )


def other_buffers(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    own = plan.parts[number].buffers
    added = tuple(buffer for buffer in own if buffer.name != "more") + (Buffer("more", (3,), torch.int64),)
    buffers = own[1:] if own and rng.random() < 0.5 else added
    return _with_part(plan, number, lambda p: dataclasses.replace(p, buffers=buffers))


def untied(rng: random.Random, plan: Plan) -> Plan:
    """A plan without its ties: the second name is a parameter of its own, in the same group."""
    for source, name, target, other in plan.ties:
        weight = next(w for w in plan.parts[source].weights if w.name == name)
        plan = _with_part(
            plan,
            target,
            lambda p, w=weight, other=other: dataclasses.replace(
                p, weights=(*p.weights, dataclasses.replace(w, name=other))
            ),
        )
        first, second = plan.local_name(source, name), plan.local_name(target, other)
        groups = tuple((((*names, second) if first in names else names), options) for names, options in plan.groups)
        plan = dataclasses.replace(plan, groups=groups)
    return dataclasses.replace(plan, ties=())


def regrouped(rng: random.Random, plan: Plan) -> Plan:
    return dataclasses.replace(plan, groups=_draw_groups(rng, list(plan.weights())))


def reshaped(rng: random.Random, plan: Plan) -> Plan:
    number = rng.randrange(len(plan.parts))
    if not plan.parts[number].weights:
        return plan
    chosen = rng.choice(plan.parts[number].weights)
    shape = (
        (1,)
        if chosen.shape == ()
        else (*chosen.shape, 1)
        if rng.random() < 0.5
        else (*chosen.shape[:-1], chosen.shape[-1] + 1)
    )
    other = dataclasses.replace(chosen, shape=shape)
    return _with_part(
        plan, number, lambda p: dataclasses.replace(p, weights=tuple(other if w == chosen else w for w in p.weights))
    )


CHANGES: tuple[Callable[[random.Random, Plan], Plan], ...] = (
    grown,
    shrunk,
    frozen_or_thawed,
    other_buffers,
    untied,
    regrouped,
    reshaped,
)


def misfitting(rng: random.Random, job: Job) -> Job:
    """A job that differs in one or two ways, as a rule in a way that strict loads refuse."""
    plans = list(job.plans)
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.randrange(len(plans))
        plans[place] = rng.choice(CHANGES)(rng, plans[place])
    changed = dataclasses.replace(job, plans=tuple(plans))
    if rng.random() < 0.1:
        changed = dataclasses.replace(changed, scheduler=not job.scheduler)
    return changed


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """What fails within it says which program it was."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
