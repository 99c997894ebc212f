"""Small models, runs and records that the tests of stage 3 share."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_cases import linear_loss, make_parameters, maybe_no_sync
from zero_optim.comm.handle import Handle

VOCABULARY = 33
ON_DISK = f"nvme:{tempfile.gettempdir()}"  # for tests that put little there; files have no name


class Block(nn.Module):
    """A residual block of odd sizes, the unit of ``Net``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding tied to the head, blocks and a norm: what no ``Block`` holds is the root's."""

    def __init__(self, width: int = 20, depth: int = 3, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Given(nn.Module):
    """A unit whose gradients are given to its forward: it adds ``linear_loss`` of its parameters to ``total``."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)

    def forward(self, total: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
        return total + linear_loss(list(self.weights), grads)


class GivenNet(nn.Module):
    """Units ``Given`` over runs of parameters of ``shapes``, the last run in the root. ``model(grads)`` is a loss."""

    def __init__(self, runs: Sequence[Sequence[Sequence[int]]], dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        own = iter(make_parameters([shape for run in runs for shape in run], dtype, seed))
        *held, last = [[next(own) for _ in run] for run in runs]
        self.units = nn.ModuleList(Given(parameters) for parameters in held)
        self.weights = nn.ParameterList(last)
        self.counts = [len(run) for run in runs]

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        *of_units, of_root = _split(grads, self.counts)
        total = torch.zeros((), requires_grad=True)
        for unit, own in zip(self.units, of_units, strict=True):
            total = unit(total, own)
        return total + linear_loss(list(self.weights), of_root)


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [list(values[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def tokens(rank: int, step: int, micro: int = 0, batch: int = 3, length: int = 9) -> Tensor:
    """[batch, length] int64, different for every rank, step and micro-batch."""
    generator = torch.Generator().manual_seed((rank * 100 + step) * 10 + micro)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The cross entropy of the next token, [] fp32."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


@dataclass(frozen=True)
class Run:
    """How a model is trained: ``micro`` backwards a step; with ``no_sync``, all but the last are under
    ``opt.no_sync()``. ``shard`` are arguments of ``shard_module``, used at stage 3; ``options`` the optimizer's."""

    stage: int = 3
    dtype: torch.dtype = torch.float32
    steps: int = 4
    micro: int = 1
    no_sync: bool = False
    lr: float = 1e-2
    clip: float | None = None
    norm_type: float = 2.0
    shard: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def at(self, stage: int) -> Run:
        """The same training at another stage."""
        return Run(**{**vars(self), "stage": stage})


@dataclass(frozen=True)
class Outcome:
    """``parameters``: full clones, by name; ``state``: of each, the full state, from ``full_state_dict``."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    stats: dict[str, Any]


def make(
    run: Run, model: nn.Module, units: Sequence[Any] = (Block,), params: Callable[[nn.Module], Any] | None = None
) -> tuple[nn.Module, Any]:
    """Collective. The model cast, sharded at stage 3, and its optimizer. ``params``: what the optimizer is given."""
    import zero_optim

    model.to(run.dtype)
    if run.stage == 3:
        zero_optim.shard_module(model, units, **run.shard)
    given = model.named_parameters() if params is None else params(model)
    stage = None if run.stage == 3 else run.stage
    return model, zero_optim.ShardedAdamW(given, lr=run.lr, stage=stage, **run.options)


def train_step(run: Run, rank: int, model: nn.Module, opt: Any, step: int) -> tuple[float, float | None]:
    """One step of ``Net``; the last loss, and the norm where it is clipped."""
    for micro in range(run.micro):
        with maybe_no_sync(opt, run.no_sync and micro < run.micro - 1):
            loss = loss_of(model, tokens(rank, step, micro))
            loss.backward()
    norm = None if run.clip is None else float(opt.clip_grad_norm_(run.clip, run.norm_type))
    opt.step()
    opt.zero_grad()
    return float(loss.detach()), norm


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Collective. Clones of the full parameters and buffers, by name."""
    import zero_optim

    with zero_optim.gather_parameters(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def full_state(opt: Any) -> dict[str, dict[str, Tensor]]:
    """Collective. ``full_state_dict`` on every rank: the state of each parameter."""
    import zero_optim

    return zero_optim.full_state_dict(opt, rank=None)["state"]


def losses_and_state(rank: int, world_size: int, run: Run, model: Callable[[], nn.Module] = Net) -> Outcome:
    """Train ``model()``, made from a seed of the rank's own: rank 0's values must win. Closes the optimizer."""
    torch.manual_seed(rank)
    net, opt = make(run, model())
    results = [train_step(run, rank, net, opt, step) for step in range(run.steps)]
    outcome = Outcome(
        [loss for loss, _ in results],
        [norm for _, norm in results if norm is not None],
        gathered(net),
        full_state(opt),
        opt.stats(),
    )
    opt.close()
    return outcome


def losses_and_states(rank: int, world_size: int, runs: Sequence[Run]) -> list[Outcome]:
    """``losses_and_state`` of ``Net`` for several runs, in one call of ``run_ranks``."""
    return [losses_and_state(rank, world_size, run) for run in runs]


@dataclass(frozen=True)
class Allocated:
    """Bytes of CPU memory that a call has left allocated, and the most that were at any time within it."""

    left: int
    peak: int


def allocated(call: Callable[[], object]) -> Allocated:
    """What ``call`` allocates through torch's allocator on this thread and autograd's, to the byte.

    Without oneDNN: its matmuls take scratch memory there, and how much depends on the CPU. Torch's own take none.

    The collectives that ``call`` leaves under way arrive before the profiler stops. A thread of gloo that ends a work
    while the profiler stops crashes torch 2.13, or never lets go of the work (seen: 3 of 8 loops of 6000 broadcasts).
    """
    in_flight: weakref.WeakSet[Handle] = weakref.WeakSet()
    start = Handle.__init__

    def noted(handle: Handle, *args: Any, **options: Any) -> None:
        start(handle, *args, **options)
        in_flight.add(handle)

    with pytest.MonkeyPatch.context() as patch, torch.autograd.profiler.profile(profile_memory=True) as profiler:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        patch.setattr(Handle, "__init__", noted)
        call()
        late = [handle for handle in in_flight if not handle.arrives_within(20)]
        assert not late, "collectives did not arrive in 20 s"
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    left = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        left += event.nbytes()
        peak = max(peak, left)
    return Allocated(left, peak)
