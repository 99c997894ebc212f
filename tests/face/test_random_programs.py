"""Random programs of backwards, drops, zeroings, edits and steps, the same on every rank, against a model of them.

Gradients are such that all sums are exact, so every stage, world size and order must give the same bits.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import run_ranks
from oracle import Hyper, MasterAdamW
from torch import Tensor, nn
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    linear_backward,
    linear_loss,
    make_gradients,
    make_parameters,
    maybe_no_sync,
    named,
)

SHAPES = ((5, 3), (130,), (1,), (0,), (2, 2), (300,))
ACTIONS = (
    "backward",
    "backward",
    "no_sync",
    "step",
    "step",
    "drop",
    "zero_grad",
    "zeros",
    "edit",
    "clip",
    "assign",
    "look",
)
LENGTH, LR = 14, 1e-2


def signs(like: list[Tensor], rank: int, number: int) -> list[Tensor]:
    """Local gradients of -3/16, 0 and 3/16: sums of fourteen, and their thirds, are exact in bf16."""
    return [g.sign() * (12 / 64) for g in make_gradients(like, rank, number, grid=1)]


@dataclass(frozen=True)
class Event:
    """One action. ``used[rank]`` are the parameters it gives gradients to there; ``chosen`` those that it changes."""

    action: str
    number: int
    used: tuple[frozenset[int], ...]
    chosen: frozenset[int]


@dataclass
class Model:
    """What ranks hold between steps: gradients of their own, and averaged ones. It knows no layout and no stages."""

    oracle: MasterAdamW
    world_size: int
    local: list[dict[int, Tensor]] = field(default_factory=list)
    reduced: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.local = [{} for _ in range(self.world_size)]

    def gradients(self, event: Event) -> list[dict[int, Tensor]]:
        per_rank = [signs(self.oracle.params, rank, event.number) for rank in range(self.world_size)]
        return [{i: grads[i] for i in used} for grads, used in zip(per_rank, event.used, strict=True)]

    def reduce(self) -> None:
        for index in set().union(*self.local):
            parts = [grads[index].float() for grads in self.local if index in grads]
            total = torch.stack(parts).sum(0) / self.world_size
            before = self.reduced.get(index)
            self.reduced[index] = total if before is None else before + total
        self.local = [{} for _ in range(self.world_size)]

    def play(self, event: Event) -> None:
        if event.action in ("backward", "no_sync"):
            for held, new in zip(self.local, self.gradients(event), strict=True):
                for index, grad in new.items():
                    held[index] = held[index] + grad if index in held else grad
            if event.action == "backward":
                self.reduce()
        elif event.action == "assign":  # to parameters that hold nothing on any rank
            for held, new in zip(self.local, self.gradients(event), strict=True):
                held.update({i: g for i, g in new.items() if i in event.chosen})
        elif event.action == "clip":
            self.reduce()
        elif event.action == "step":
            self.reduce()
            self.oracle.step([self.reduced.get(i) for i in range(len(SHAPES))])
        elif event.action == "drop":
            for held in (*self.local, self.reduced):
                for index in event.chosen & held.keys():
                    del held[index]
        elif event.action == "zero_grad":
            for held in (*self.local, self.reduced):
                held.clear()
        elif event.action == "zeros":
            for held in (*self.local, self.reduced):
                for index in held:
                    held[index] = torch.zeros_like(held[index])
        elif event.action == "edit":
            for index in event.chosen:
                self.oracle.params[index] = torch.full_like(self.oracle.params[index], float(event.number))
                self.oracle.master[index] = self.oracle.params[index].float()


def program(seed: int, world_size: int) -> list[Event]:
    """A random program; it starts with a backward of everything and ends with a step.

    In odd programs the ranks use different parameters. Those drop no single gradients: a rank that never had a
    parameter's gradient cannot tell whether the others dropped theirs. What was dropped is not assigned at once: that
    is replacing, which no program does.
    """
    rng = random.Random(seed)
    everything = frozenset(range(len(SHAPES)))
    events = [Event("backward", 0, (everything,) * world_size, everything)]
    holders, dropped, clipped = set(everything), set(), False
    for number in range(1, LENGTH):
        action = rng.choice([a for a in ACTIONS if not (seed % 2 and a == "drop")])
        used = tuple(frozenset(i for i in everything if rng.random() < 0.8) for _ in range(world_size))
        used = used if seed % 2 else (used[0],) * world_size
        chosen = frozenset(i for i in everything if rng.random() < 0.4)
        if clipped and action in ("assign", "drop"):
            action = "step"  # a change of gradients between clip and step has tests of its own
        clipped = action == "clip" or (clipped and action in ("look", "edit", "zeros"))
        if action == "assign":
            chosen -= holders | dropped
        events.append(Event(action, number, used, chosen))
        if action in ("backward", "no_sync"):
            holders |= set().union(*used)
        elif action == "assign":
            holders |= set().union(*used) & chosen
        elif action == "zero_grad":
            holders = set()
        elif action == "drop":
            holders -= chosen
            dropped |= chosen
        if action in ("backward", "step", "zero_grad"):
            dropped = set()
    return [*events, Event("step", LENGTH, (everything,) * world_size, everything)]


def look(opt: Any, params: list[nn.Parameter], grads: list[Tensor]) -> None:
    """What must change nothing."""
    opt.stats()
    opt.state_dict()
    torch.autograd.grad(linear_loss(params, grads), params)
    with torch.no_grad():
        linear_loss(params, grads)
    assert all(p.grad is None or p.grad.shape == p.shape for p in params)


def run(rank: int, world_size: int, seed: int, stage: int, dtype: torch.dtype, options: dict) -> list[list[Tensor]]:
    """Parameters after each event."""
    import zero_optim

    params = make_parameters(SHAPES, dtype)
    opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, **options)
    history = []
    warnings.filterwarnings("ignore", message=".*clip_grad_norm_.*")
    for event in program(seed, world_size):
        grads = signs(params, rank, event.number)
        if event.action in ("backward", "no_sync"):
            with maybe_no_sync(opt, event.action == "no_sync"):
                if event.used[rank]:
                    linear_backward(params, [g if i in event.used[rank] else None for i, g in enumerate(grads)])
        elif event.action == "assign":
            for index in event.used[rank] & event.chosen:
                params[index].grad = grads[index]
        elif event.action == "step":
            opt.step()
        elif event.action == "drop":
            for index in event.chosen:
                params[index].grad = None
        elif event.action == "zero_grad":
            opt.zero_grad()
        elif event.action == "zeros":
            opt.zero_grad(set_to_none=False)
        elif event.action == "edit":
            with torch.no_grad():
                for index in event.chosen:
                    params[index].fill_(float(event.number))
        elif event.action == "clip":
            opt.clip_grad_norm_(1e9)
        elif event.action == "look":
            look(opt, params, grads)
        history.append(copies(params))
    opt.close()
    return history


def _run_all(rank: int, world_size: int, seeds: range, dtype: torch.dtype) -> dict[tuple, list[list[Tensor]]]:
    return {
        (seed, stage, cap): run(rank, world_size, seed, stage, dtype, {"bucket_cap_mb": cap})
        for seed in seeds
        for stage in (0, 1, 2)
        for cap in (TINY_CAP_MB, 25.0)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_programs(world_size, dtype):
    seeds = range(8) if dtype == torch.float32 else range(100, 104)
    results = run_ranks(world_size, _run_all, seeds, dtype)
    for seed in seeds:
        model = Model(MasterAdamW(make_parameters(SHAPES, dtype), Hyper(lr=LR)), world_size)
        events = program(seed, world_size)
        for number, event in enumerate(events):
            model.play(event)
            done = " ".join(e.action for e in events[: number + 1])
            for rank, histories in enumerate(results):
                for (own_seed, stage, cap), history in histories.items():
                    if own_seed == seed:
                        what = f"seed {seed}, stage {stage}, cap {cap}, rank {rank}, after: {done}"
                        assert_bitwise(history[number], model.oracle.params, what)
