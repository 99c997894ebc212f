"""Averages of the parameters on hybrid meshes, of slices and of experts, against averages of whole masters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import eventful_cases
import expert_cases
import grid_cases
import megatron_cases
import pytest
import tensor_cases
import torch
import zero_optim
from cells import slow_where
from eventful_cases import ABSENT, OVERFLOW
from harness import run_ranks
from torch import Tensor, nn

DECAY, LOOKED_AT, STEPS = 0.9, 3, 4
"""``LOOKED_AT``: the step before which the parameters are their averages for a while."""


@dataclass(frozen=True)
class Job:
    """What a rank trains. ``absent``: how names begin of those that have no part in the step ``ABSENT``; ``plain``:
    whether parameters are fp32 and whole here, and no rank may gather them; ``readers``: ranks that get the averages
    where rank 0 is asked for."""

    model: nn.Module
    opt: Any
    loss: Callable[[int], Tensor]
    absent: str
    plain: bool = False
    readers: Sequence[int] = (0,)

    def step(self, number: int) -> None:
        loss = self.loss(number)
        (loss * math.inf if number == OVERFLOW else loss).backward()
        self.opt.step()
        self.opt.zero_grad()

    def wholes(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Collective. Parameters; with a ``dtype``, their masters."""
        if self.plain:
            return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        opt = None if dtype is None else self.opt
        return {name: whole.clone() for name, whole in zero_optim.iter_full_parameters(self.model, opt, dtype)}


def follow(rank: int, make: Callable[[], Job]) -> None:
    """The averages by hand beside the optimizer's, and a second training that nobody has looked at."""
    job = make()
    trained = [name for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    averages, rate = job.wholes(torch.float32), torch.tensor(1 - DECAY, dtype=torch.float64).float()
    updates = dict.fromkeys(trained, 0)
    for step in range(STEPS):
        if step == LOOKED_AT:
            look(job, averages)
        job.step(step)
        masters = job.wholes(torch.float32)
        for name in trained:
            if step != OVERFLOW and not (step == ABSENT and name.startswith(job.absent)):
                own = rate if updates[name] else 1.0
                updates[name] += 1
                averages[name] = averages[name] + own * (masters[name] - averages[name])
    if job.plain:
        with pytest.raises(zero_optim.ParameterError, match="experts"):
            job.opt.ema_state_dict()
    else:
        wanted = {name: averages[name] for name in trained}
        same(job.opt.ema_state_dict(rank=None), wanted)
        same(job.opt.ema_state_dict(), wanted if rank in job.readers else {})
        with pytest.raises(ValueError, match="rank must be None or one of [24] ranks, got 4"):
            job.opt.ema_state_dict(rank=4)
    with job.opt.swap_to_ema():
        shown = job.wholes()
    same(shown, {name: average.to(shown[name].dtype) for name, average in averages.items()})
    twin = make()
    for step in range(STEPS):
        twin.step(step)
    same(job.wholes(torch.float32), twin.wholes(torch.float32))
    job.opt.close()
    twin.opt.close()


def look(job: Job, averages: dict[str, Tensor]) -> None:
    before, masters = job.wholes(), job.wholes(torch.float32)
    with job.opt.swap_to_ema():
        same(job.wholes(), {name: average.to(before[name].dtype) for name, average in averages.items()})
        job.loss(LOOKED_AT).backward()  # a forward that gathers what is shared, and gradients that are dropped
        job.opt.zero_grad()
    same(job.wholes(), before)
    same(job.wholes(torch.float32), masters)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def make_optimizer(params: Any, **options: Any) -> Any:
    return zero_optim.ShardedAdamW(params, lr=1e-2, ema_decay=DECAY, **options)


# -- topologies --------------------------------------------------------------------------------------------------------


def hybrid(rank: int, stage: int, **given: Any) -> Callable[[], Job]:
    mesh = grid_cases.make_mesh(2, 2)

    def data(step: int, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank * 100 + step)
        return torch.randn(6, eventful_cases.WIDTH, generator=generator).bfloat16()

    def make() -> Job:
        torch.manual_seed(0)
        model = eventful_cases.Net().bfloat16()
        if stage == 3:
            zero_optim.shard_module(model, (nn.Linear,), mesh=mesh, **given)
        opt = make_optimizer(model.named_parameters(), mesh=mesh, stage=stage, **given)
        loss = lambda step: eventful_cases.loss_of(model, data, step, 0).float()  # noqa: E731
        return Job(model, opt, loss, "middle")

    return make


def sliced(rank: int, stage: int) -> Callable[[], Job]:
    mesh = tensor_cases.make_mesh(2, 2)

    def make() -> Job:
        model = tensor_cases.make_model(tensor_cases.Way(dtype=torch.bfloat16, sequence=False), mesh["tp"])
        opt = make_optimizer(model.named_parameters(), mesh=mesh["dp"], stage=stage)
        use = lambda step: (0,) if step == ABSENT else (0, 1)  # noqa: E731
        return Job(model, opt, lambda step: tensor_cases.loss_of(model, rank // 2, step, use=use(step)), "blocks.1")

    return make


def plain_slices(rank: int, stage: int) -> Callable[[], Job]:
    """Each tensor-parallel rank has averages of its own slices, on its first data-parallel rank."""
    mesh = tensor_cases.make_mesh(2, 2)

    def make() -> Job:
        model = megatron_cases.make_model(mesh["tp"].get_group(), torch.bfloat16)
        opt = make_optimizer(model.named_parameters(), mesh=mesh["dp"], tensor_parallel=mesh["tp"], stage=stage)
        use = lambda step: (0,) if step == ABSENT else (0, 1)  # noqa: E731
        loss = lambda step: megatron_cases.loss_of(model, rank // 2, step, use=use(step))  # noqa: E731
        return Job(model, opt, loss, "blocks.1", readers=(0, 1))

    return make


def experts(rank: int, how: tuple[bool, int]) -> Callable[[], Job]:
    mesh = expert_cases.make_mesh()
    stacked, stage = how
    dtype = torch.bfloat16 if stacked else torch.float32
    way = expert_cases.Way(stacked=stacked, dtype=dtype, left_out=ABSENT)

    def make() -> Job:
        model = expert_cases.make_model(way, mesh)
        if stage == 3:
            zero_optim.shard_module(model, (), experts={"experts": mesh["edp"]})
        opt = make_optimizer(expert_cases.groups_of(model, mesh), stage=stage)

        def loss(step: int) -> Tensor:
            return way.loss(model, rank, step, 0, way.routes(mesh, step))

        return Job(model, opt, loss, "experts", plain=not stacked)

    return make


CASES = {
    "hybrid at stage 2": (hybrid, 2),
    "hybrid at stage 3": (hybrid, 3),
    "state over all at stage 3": (functools.partial(hybrid, state_over="all"), 3),
    "tensor parallel": (sliced, 2),
    "plain slices": (plain_slices, 2),
    "experts that are DTensors": (experts, (True, 2)),
    "experts that are DTensors, at stage 3": (experts, (True, 3)),
    "experts that are plain tensors": (experts, (False, 2)),
}


def follow_case(rank: int, world_size: int, name: str) -> None:
    topology, argument = CASES[name]
    follow(rank, topology(rank, argument))


SLOW = ("hybrid at stage 2", "tensor parallel")  # stage 2 has others, and so have DTensors


@pytest.mark.parametrize("name", slow_where(SLOW.__contains__, CASES))
def test_averages_are_those_of_whole_masters(name: str) -> None:
    run_ranks(4, follow_case, name)
