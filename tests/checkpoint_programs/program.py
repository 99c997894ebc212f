"""What a program of checkpoints is: data. ``repr`` of one, evaluated with this module's names, is the program again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from programs.shrink import put

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ANCHOR = "anchor"  # a parameter of every model that each backward reaches on every rank
WIDTH = 4  # of a BatchNorm
IN_BF16 = ("bf16", "bf16_stochastic")  # forms of state; what is loaded into either is rounded to nearest


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
class Group:
    """Parameters by the names that the model has for them."""

    names: tuple[str, ...]
    lr: float = 1e-2
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Tie:
    """A weight of a part, and the name that it also has in another part."""

    part: int
    name: str
    other_part: int
    other_name: str


@dataclass(frozen=True)
class Plan:
    """One model with its optimizer. ``rule``: sharded, or adamw for torch's. ``master``, ``state_dtype``: the form of
    the state of a sharded one."""

    parts: tuple[Part, ...]
    groups: tuple[Group, ...]
    ties: tuple[Tie, ...] = ()
    rule: str = "sharded"
    stage: int = 2
    cap: float | None = None
    dtype: str = "fp32"
    master: str = "fp32"
    state_dtype: str = "fp32"

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
        return {self.local_name(t.other_part, t.other_name): self.local_name(t.part, t.name) for t in self.ties}

    def removable(self) -> list[tuple[int, str]]:
        """Part and name of every weight that the plan can do without."""
        weights = [(number, weight.name) for number, part in enumerate(self.parts) for weight in part.weights]
        tied = [(tie.part, tie.name) for tie in self.ties]
        return [weight for weight in weights if weight[1] != ANCHOR and weight not in tied]


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
            [[pre + name for name in group.names] for group in plan.groups]
            for pre, plan in zip(self.prefixes(), self.plans, strict=True)
        ]


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
    """``source`` is trained and saved on ``saving`` ranks. ``target`` is made anew on ``loading`` ranks, and loads it.
    ``stepped``: after a step of its own. ``with_opt``: load is given its optimizers."""

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


def with_part(plan: Plan, number: int, **fields: Any) -> Plan:
    """A part of it with other ``weights`` or ``buffers``."""
    return replace(plan, parts=put(plan.parts, number, replace(plan.parts[number], **fields)))


def without(plan: Plan, number: int, gone: str) -> Plan:
    """A part of it without a weight, which is not tied."""
    left = tuple(weight for weight in plan.parts[number].weights if weight.name != gone)
    local_name = plan.local_name(number, gone)
    groups = (replace(g, names=tuple(name for name in g.names if name != local_name)) for g in plan.groups)
    return replace(with_part(plan, number, weights=left), groups=tuple(group for group in groups if group.names))
