"""A model with one of each, jobs that save and load it, and what they are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zero_optim
from grid_cases import make_mesh
from sharded_cases import full_state, gathered
from torch import Tensor, nn

VOCABULARY = 29
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cell(nn.Module):
    """A unit of odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Zoo(nn.Module):
    """A tied head, frozen and unused parameters, an empty one, a scalar, buffers of several dtypes."""

    def __init__(self, width: int = 12, depth: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.cells = nn.ModuleList(Cell(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.empty(3, 0))
        self.unused = nn.Parameter(torch.randn(7))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("table", torch.randn(2, 3, dtype=torch.float64))
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.frozen
        for cell in self.cells:
            x = cell(x)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.head(x * self.gain) + self.empty.sum()


@dataclass(frozen=True)
class Job:
    """How a model is trained. ``split``: where the second of the parameter groups begins. ``replicas``: rows of a mesh;
    0: there is none. ``state_over``: which of its ranks."""

    stage: int = 2
    dtype: torch.dtype = torch.float32
    cap: float | None = None
    split: int = 3
    replicas: int = 0
    state_over: str = "shard"


def make_zoo(job: Job, seed: int, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    """Collective. The model, sharded at stage 3, and its optimizer."""
    torch.manual_seed(seed)
    model = (Zoo() if model is None else model).to(job.dtype)
    mesh = make_mesh(job.replicas, dist.get_world_size() // job.replicas) if job.replicas else None
    if job.stage == 3:
        zero_optim.shard_module(model, [Cell], mesh=mesh, state_over=job.state_over)
    named = list(model.named_parameters())
    groups = [
        {"params": named[: job.split], "lr": 3e-3, "weight_decay": 0.1},
        {"params": named[job.split :], "lr": 1e-2, "betas": (0.8, 0.95)},
    ]
    stage = None if job.stage == 3 else job.stage
    own = {"stage": stage, "bucket_cap_mb": job.cap, "mesh": mesh, "state_over": job.state_over}
    return model, zero_optim.ShardedAdamW(groups, **own)


def tokens_of(step: int, rank: int, world_size: int, total: int = 12) -> Tensor:
    """[total / world_size, 8] int64: a step's windows are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (total, 8), generator=generator)[rank::world_size]


def train_zoo(model: nn.Module, opt: Any, steps: range, rank: int, world_size: int) -> list[float]:
    losses = []
    for step in steps:
        tokens = tokens_of(step, rank, world_size)
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@dataclass(frozen=True)
class Seen:
    """A job from outside: whole values and state by name, and the options of its groups."""

    values: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    groups: list[dict[str, Any]]


def look(model: nn.Module, opt: Any) -> Seen:
    """Collective."""
    names = [name for group in opt.param_groups for name in group["param_names"]]
    state = {names[index]: entry for index, entry in full_state(opt).items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
    values = gathered(model)
    del values["head.weight"]  # tied
    return Seen(values, state, groups)


def assert_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str = "") -> None:
    assert ours.keys() == theirs.keys(), what
    wrong = [name for name, of in theirs.items() if ours[name].dtype != of.dtype or not torch.equal(ours[name], of)]
    assert not wrong, f"{what}: {wrong}"


def assert_loaded(saved: Seen, loaded: Seen, dtype: torch.dtype) -> None:
    """``loaded``, of parameters of ``dtype``, is what ``saved`` was, bit for bit; other dtypes come of the masters."""
    assert saved.groups == loaded.groups
    assert saved.state.keys() == loaded.state.keys() and len(saved.state) > 10
    for name, entry in saved.state.items():
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[kind], loaded.state[name][kind]), (name, kind)
        precise = entry.get("master", saved.values[name])
        assert torch.equal(loaded.values[name], precise.to(dtype)), name
        if "master" in loaded.state[name]:
            assert torch.equal(loaded.state[name]["master"], precise.float()), name
    for name in saved.values.keys() - saved.state.keys():  # buffers, and what never had a gradient
        assert torch.equal(loaded.values[name], saved.values[name].to(loaded.values[name].dtype)), name


def flip(file: Path, place: int) -> None:
    """Turn a bit of a file over."""
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)
