"""Sharded models that are not called by their root: what that gathers, after a wrapper has gone, what is refused.

``random_programs/test_models.py`` has the numbers of such calls, at stages 2 and 3 and in plain torch.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import zero_optim
from harness import run_ranks
from sharded_cases import Block, Net, tokens
from torch import Tensor, nn


class Inner(Net):
    """A model with methods, as others wrap it."""

    def __init__(self) -> None:
        super().__init__(width=12, depth=0)
        self.blocks = nn.ModuleList(Block(12) for _ in range(3))
        self.rest = nn.Sequential(*self.blocks)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature

    def encode(self, x: Tensor) -> Tensor:
        """Modules alone."""
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def cooled(self, x: Tensor) -> Tensor:
        return x / self.temperature


class Wrapper(nn.Module):
    """What is given to ``shard_module``. It has an adapter of its own, and calls on."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Inner()
        self.adapter = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.base.head(self.adapter(self.base.encode(x)))

    def generate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([x, self.base(x)[:, -1:].argmax(-1)], 1)
        return x


Call = Callable[[Wrapper, Tensor], Tensor]


def block_by_block(model: Wrapper, x: Tensor) -> Tensor:
    h = model.base.embedding(x)
    for block in model.base.blocks:
        h = block(h)
    return model.base.head(model.base.norm(h))


def module_by_module(model: Wrapper, x: Tensor) -> Tensor:
    h = model.base.embedding(x)
    for block in model.base.blocks:
        h = h + block.down(F.gelu(block.up(block.norm(h))))
    return model.base.head(h)


CALLS: dict[str, Call] = {
    "the root": lambda model, x: model(x),
    "the model within": lambda model, x: model.base(x),
    "block by block": block_by_block,
    "module by module": module_by_module,
    "a part and the rest": lambda model, x: model.base.head(model.base.rest(model.base.embedding(x))),
}


def make() -> tuple[Wrapper, zero_optim.ShardedAdamW]:
    torch.manual_seed(0)
    model = Wrapper()
    zero_optim.shard_module(model, (Block,))
    return model, zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2)


def gathers(rank: int, world_size: int, name: str) -> int:
    """In a step, once the order is known."""
    model, opt = make()
    for number in range(3):
        before = opt.stats()["collectives"].get("all_gather", {"calls": 0})["calls"]
        CALLS[name](model, tokens(rank, number)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    calls = opt.stats()["collectives"]["all_gather"]["calls"] - before
    opt.close()
    return calls


@pytest.mark.parametrize(
    "name", ["the root", "the model within", "block by block", "module by module", "a part and the rest"]
)
def test_a_step_gathers_no_more_than_by_the_root(name: str) -> None:
    """The root once, and each of three units for its forward and for its backward."""
    assert run_ranks(2, gathers, name) == [7, 7]


def noted(rank: int, world_size: int) -> list[int]:
    """How many calls the schedule has noted, after each step."""
    model, opt = make()
    counts = []
    for number in range(4):
        block_by_block(model, tokens(rank, number)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        schedule = model._zero_optim_sharded.schedule
        counts.append(len(schedule.orders.called) + len(schedule.orders.ended))
    opt.close()
    return counts


def test_steps_by_parts_leave_nothing_behind() -> None:
    first, *others = run_ranks(2, noted)[0]
    assert all(count == first for count in others)


def without_wrapper(rank: int, world_size: int) -> None:
    """The wrapper goes, and with it what ``shard_module`` was given. The model within trains on."""
    torch.manual_seed(0)
    wrapper = Wrapper()
    zero_optim.shard_module(wrapper, (Block,))
    opt = zero_optim.ShardedAdamW(wrapper.named_parameters(), lr=1e-2)
    model = wrapper.base
    wrapper(tokens(rank, 0)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    opt.close()
    del wrapper, opt
    gc.collect()
    with zero_optim.gather_parameters(model):
        ordinary = copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(tokens(0, 1)), ordinary(tokens(0, 1)))


def test_the_model_within_outlives_its_wrapper() -> None:
    run_ranks(2, without_wrapper)


def generates(rank: int, world_size: int) -> None:
    model, opt = make()
    with zero_optim.gather_parameters(model):
        ordinary = copy.deepcopy(model)
    assert torch.equal(model.generate(tokens(rank, 0)), ordinary.generate(tokens(rank, 0)))
    before = opt.stats()["collectives"]["all_gather"]["calls"]
    zero_optim.register_forward_method(model, "generate")
    assert torch.equal(model.generate(tokens(rank, 1)), ordinary.generate(tokens(rank, 1)))
    assert opt.stats()["collectives"]["all_gather"]["calls"] - before <= 12
    opt.close()


def test_a_method_that_calls_the_model_several_times() -> None:
    run_ranks(2, generates)


def refused(rank: int, world_size: int) -> None:
    model, opt = make()
    with pytest.raises(zero_optim.ShardAccessError, match=r"temperature.*register_forward_method"):
        Inner.cooled(model.base, torch.ones(1))
    with pytest.raises(AttributeError, match="Wrapper has no method 'decode' to register"):
        zero_optim.register_forward_method(model, "decode")
    opt.close()


def test_a_method_that_is_not_registered_names_what_to_do() -> None:
    run_ranks(2, refused)
