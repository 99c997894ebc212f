"""The jobs of a program: modules and optimizers made of a plan, what they do, and what is seen of them.

A job is seen as plain dictionaries of whole tensors, by names that its plan gives, and through nothing of the package
but ``gather_parameters`` and ``full_state_dict``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import zero_optim
from programs.family import See
from torch import Tensor, nn
from training_cases import maybe_no_sync
from zero_optim import StateMismatchError, checkpoint

from checkpoint_programs.program import ANCHOR, DTYPES, WIDTH, Job, Part, Plan, Program, Step

TAIL = (Step(clip=True), Step(micro=2))  # after a checkpoint


def save(program: Program, rank: int, folder: str, see: See) -> None:
    running = Running(program.source, program.seed, rank)
    for number, step in enumerate(program.steps):
        running.train(number, step)
    see("before", observe(running))
    checkpoint.save(folder, running.model, **running.given(), step=program.seed, extra={"seed": program.seed})
    see("saved", observe(running))
    go_on(program, running, see)


def load(program: Program, rank: int, folder: str, see: See) -> None:
    """Strictly, and where that is refused, not strictly."""
    running = Running(program.target, program.seed + 5000, rank)
    if program.stepped:
        running.train(50, Step())
    see("before", observe(running))
    for strict in (True, False):
        try:
            loaded = checkpoint.load(
                folder, running.model, **running.given() if program.with_opt else {}, strict=strict
            )
        except StateMismatchError as error:
            see("refused", observe(running), str(error))
        else:
            see("loaded", observe(running), (loaded.step, loaded.extra), loaded.notes)
            break
    go_on(program, running, see)


def go_on(program: Program, running: Running, see: See) -> None:
    """Where the target is as the source was. If it is on another number of ranks, all have the same gradients, on which
    any number of ranks agrees."""
    if program.goes_on:
        for number, step in enumerate(TAIL):
            running.train(10 + number, step, alike=program.saving != program.loading)
        see("later", observe(running))
    running.close()


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
        for tie in plan.ties:
            tied = self._part(tie.part)._parameters[tie.name]
            self._part(tie.other_part).register_parameter(tie.other_name, tied)

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
        for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
            seeded(8 * seed + rank)
        self.job, self.rank = job, rank
        self.models: list[nn.Module] = []
        self.opts: list[Any] = []
        for number, plan in enumerate(job.plans):
            model: nn.Module = Model(plan, seed + 100 * number)
            sharded = plan.rule == "sharded"
            if sharded and plan.stage == 3:
                zero_optim.shard_module(model, units=(Unit,))
            own = dict(model.named_parameters())
            groups = [
                {"params": [(n, own[n]) for n in g.names], "lr": g.lr, "weight_decay": g.weight_decay}
                for g in plan.groups
            ]
            if sharded:
                more = {} if plan.stage == 3 else {"stage": plan.stage}
                more |= {} if plan.cap is None or plan.stage == 3 else {"bucket_cap_mb": plan.cap}
                more |= {"master": plan.master, "state_dtype": plan.state_dtype}
                self.opts.append(zero_optim.ShardedAdamW(groups, **more))
            else:
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

    def train(self, number: int, step: Step, alike: bool = False) -> None:
        """``alike``: all ranks have the same gradients."""
        for model, opt, plan in zip(self.models, self.opts, self.job.plans, strict=True):
            sharded = plan.rule == "sharded"
            rank = 0 if alike or not sharded else self.rank
            for turn in range(step.micro):
                gradients = _gradients(plan, number * 10 + turn, rank)
                if step.overflow and sharded and rank == self.rank == 0:
                    gradients[ANCHOR] = torch.full_like(gradients[ANCHOR], torch.inf)
                with maybe_no_sync(opt, sharded and turn < step.micro - 1):
                    loss = model(gradients, number * 100 + turn * 10 + rank)
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if self.scaler is not None:
                self.scaler.step(opt)
                self.scaler.update()
            else:
                if step.clip and sharded:
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


def _gradients(plan: Plan, salt: int, rank: int) -> dict[str, Tensor]:
    found = {}
    names = plan.weights() | {other: plan.weights()[name] for other, name in plan.aliases().items()}
    for index, (name, weight) in enumerate(names.items()):
        seed = (salt * 8 + rank) * 100 + index
        used = {"always": True, "never": False, "odd": salt // 10 % 2 == 1, "ranks": (salt // 10 + rank) % 2 == 0}
        if used[weight.used] and weight.trained:
            found[name] = torch.randint(-16, 17, weight.shape, generator=torch.Generator().manual_seed(seed)) / 64
    return found


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
