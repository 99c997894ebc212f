"""A training in which all happens that a topology has to bear, on ranks and in one process: for tests of every room."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_cases import maybe_no_sync

STEPS, MAX_NORM = 5, 0.1
OVERFLOW, ABSENT, SAVED = 1, 2, 3
"""The step in which rank 3 has a gradient that is not finite, that in which parameters have no part, and that after
which the training is saved."""
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Job:
    """What a rank trains. The optimizer has all parameters, as the model orders them. ``backwards`` makes the gradients
    of a step."""

    model: nn.Module
    opt: Any
    backwards: Callable[[int], None]


@dataclass(frozen=True)
class Outcome:
    """``state``: full, by parameter; ``resumed``: parameters of an optimizer that has loaded what was saved, and has
    gone on."""

    parameters: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Tensor]]
    norms: Sequence[float]
    skipped: int
    resumed: Mapping[str, Tensor]


def train(make: Callable[..., Job], folder: str) -> Outcome:
    """``make`` is given options of the optimizer. The one that goes on from the checkpoint has its state off the
    device. ``folder``: of this rank's stage of a pipeline."""
    import zero_optim

    job = make()
    norms = []
    for step in range(STEPS):
        norms.append(_step(job, step))
        if step == SAVED:
            zero_optim.checkpoint.save(folder, job.model, job.opt, step=step)
    names = [name for name, _ in job.model.named_parameters()]
    state = {names[index]: of for index, of in zero_optim.full_state_dict(job.opt, rank=None)["state"].items()}
    parameters, skipped = _wholes(job), job.opt.stats()["skipped_steps"]
    job.opt.close()
    job = make(state_offload="cpu")
    zero_optim.checkpoint.load(folder, job.model, job.opt)
    for step in range(SAVED + 1, STEPS):
        _step(job, step)
    resumed = _wholes(job)
    job.opt.close()
    return Outcome(parameters, state, norms, skipped, resumed)


def _step(job: Job, step: int) -> float:
    """The norm before it was clipped."""
    job.backwards(step)
    norm = float(job.opt.clip_grad_norm_(MAX_NORM))
    job.opt.step()
    job.opt.zero_grad()
    return norm


def _wholes(job: Job) -> dict[str, Tensor]:
    import zero_optim

    return {name: whole.clone() for name, whole in zero_optim.iter_full_parameters(job.model)}


def assert_as_in_one_process(
    outcomes: Sequence[Outcome],
    model: nn.Module,
    backwards: Callable[[int], None],
    tolerance: float = 2e-6,
    part: Callable[[int, str, Tensor], Tensor] = lambda rank, name, whole: whole,
) -> None:
    """By ``torch.optim.AdamW``, of ``model`` in whole; of what was resumed, bits.

    ``part``: what a rank has of a parameter of that name, or of its state.
    """
    norms = []
    opt = torch.optim.AdamW(model.parameters(), **HYPER)
    for step in range(STEPS):
        if step == OVERFLOW:
            continue
        backwards(step)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        opt.step()
        opt.zero_grad()
    assert min(norms) > MAX_NORM, "each step is clipped"
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    state = {name: opt.state[p] for name, p in model.named_parameters() if p in opt.state}
    for rank, found in enumerate(outcomes):
        there = found.parameters.keys()
        for name in there:
            wanted = part(rank, name, parameters[name])
            torch.testing.assert_close(found.parameters[name], wanted, rtol=10 * tolerance, atol=tolerance)
        assert found.state.keys() == there & state.keys()
        for name, entry in found.state.items():
            for kind, value in state[name].items():
                wanted = value if kind == "step" else part(rank, name, value)
                torch.testing.assert_close(entry[kind], wanted, rtol=50 * tolerance, atol=tolerance)
        assert found.skipped == 1 and not math.isfinite(found.norms[OVERFLOW])
        finite = [norm for step, norm in enumerate(found.norms) if step != OVERFLOW]
        assert finite == pytest.approx(norms, rel=5 * tolerance)
        assert [name for name in there if not torch.equal(found.resumed[name], found.parameters[name])] == []
    assert set().union(*(found.parameters.keys() for found in outcomes)) == parameters.keys()


# -- ranks with the same parameters, each with data of its own ---------------------------------------------------------

WIDTH, MICRO = 12, 2
Data = Callable[[int, int], Tensor]
"""[rows, WIDTH] fp32, of a step and a micro-batch."""


class Net(nn.Module):
    """A bias is frozen, and the layer in the middle can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 20), nn.Linear(20, 20), nn.Linear(20, WIDTH)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor, *, short: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x if short else torch.tanh(self.middle(x)))


def loss_of(model: nn.Module, data: Data, step: int, micro: int) -> Tensor:
    return model(data(step, micro), short=step == ABSENT).square().mean()


def train_net(rank: int, stage: int, mesh: dist.DeviceMesh, data: Data, folder: str) -> Outcome:
    """``data``: of this rank."""
    import zero_optim

    def make(**options: Any) -> Job:
        torch.manual_seed(rank)  # rank 0's parameters are everyone's
        model = Net()
        if stage == 3:
            zero_optim.shard_module(model, (nn.Linear,), mesh=mesh)
        opt = zero_optim.ShardedAdamW(model.named_parameters(), stage=stage, mesh=mesh, **HYPER, **options)

        def backwards(step: int) -> None:
            for micro in range(MICRO):
                with maybe_no_sync(opt, micro < MICRO - 1):
                    loss = loss_of(model, data, step, micro)
                    (loss * math.inf if rank == 3 and step == OVERFLOW else loss).backward()

        return Job(model, opt, backwards)

    return train(make, folder)


def assert_net_as_in_one_process(outcomes: Sequence[Outcome], data: Data) -> None:
    """``data``: of all ranks."""
    torch.manual_seed(0)
    model = Net()

    def backwards(step: int) -> None:
        for micro in range(MICRO):
            loss_of(model, data, step, micro).backward()

    assert_as_in_one_process(outcomes, model, backwards)
