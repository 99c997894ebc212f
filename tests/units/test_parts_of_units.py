"""Sharded models that are not called by their root: by inner modules, methods, new wrappers, after a wrapper has gone.

Each program runs at stage 3 and at stage 2, where modules keep their parameters, and must give the same bits.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zero_optim
from harness import run_ranks
from sharded_cases import Block, Net, gathered, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_cases import difference

KEEP = {"reshard_after_forward": False}


class Scaled(Block):
    """A block that has a parameter of its own beside its modules', and other methods than ``forward``."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.full((width,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def calling(self, x: Tensor, other: nn.Module) -> Tensor:
        return self(other(self.up(x)[:, :, :12])) * self.scale

    def scaled(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


class Halving(nn.Module):
    """Calls itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain if len(x) < 2 else torch.cat([self(half) for half in x.split((len(x) + 1) // 2)]) + x


class Inner(Net):
    """A model with methods, as others wrap it."""

    def __init__(self) -> None:
        super().__init__(width=12, depth=0)
        self.blocks = nn.ModuleList(Scaled(12) for _ in range(3))
        self.rest = nn.Sequential(*self.blocks)
        self.halving = Halving(12)
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

    def classify(self, x: Tensor) -> Tensor:
        """Also the root's own parameter."""
        return self.head(self.encode(x)) / self.temperature


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


def checkpointed(model: Wrapper, x: Tensor, reentrant: bool) -> Tensor:
    h = model.base.embedding(x)
    for block in model.base.blocks:
        h = checkpoint(block.up, h, use_reentrant=reentrant)
        h = checkpoint(lambda h, block=block: block.down(F.gelu(h)), h, use_reentrant=reentrant)
    return model.base.head(h)


CALLS: dict[str, Call] = {
    "the root": lambda model, x: model(x),
    "the model within": lambda model, x: model.base(x),
    "a method of modules": lambda model, x: model.base.head(model.base.encode(x)),
    "a registered method": lambda model, x: model.base.classify(x),
    "a registered method of a unit": lambda model, x: model.base.head(
        model.base.blocks[1].scaled(model.base.encode(x))
    ),
    "block by block": block_by_block,
    "module by module": module_by_module,
    "a part and the rest": lambda model, x: model.base.head(model.base.rest(model.base.embedding(x))),
    "a unit's forward itself": lambda model, x: model.base.head(
        Block.forward(model.base.blocks[2], model.base.embedding(x))
    ),
    "units backwards": lambda model, x: model.base.head(
        model.base.blocks[0](model.base.blocks[2](model.base.embedding(x)))
    ),
    "one that calls itself": lambda model, x: model.base.head(model.base.halving(model.base.embedding(x))),
    "a new wrapper": lambda model, x: nn.Sequential(model.base, nn.Softmax(-1))(x),
    "a unit alone": lambda model, x: model.base.blocks[1](F.one_hot(x % 12, 12).float()),
    "the root's alone": lambda model, x: model.adapter(F.one_hot(x % 12, 12).float()),
    "checkpoints": lambda model, x: checkpointed(model, x, reentrant=False),
    "re-entrant checkpoints": lambda model, x: checkpointed(model, x, reentrant=True),
    "a unit that calls another": lambda model, x: model.base.head(
        model.base.blocks[2].calling(model.base.embedding(x), model.base.blocks[0])
    ),
    "twice": lambda model, x: model.base.head(model.base.encode(x)) + model(x),
}


def make(stage: int, **options: Any) -> tuple[Wrapper, zero_optim.ShardedAdamW]:
    torch.manual_seed(0)
    model = Wrapper()
    if stage == 3:
        zero_optim.shard_module(model, (Scaled,), **options)
    zero_optim.register_forward_method(model.base, "classify")
    zero_optim.register_forward_method(model.base.blocks[1], "scaled")
    zero_optim.register_forward_method(model.base.blocks[2], "calling")
    return model, zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2, stage=stage)


def train(calls: list[Call], rank: int, stage: int, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """A step by each call, and an evaluation by the next between them: losses, and what the parameters become."""
    model, opt = make(stage, **options)
    losses = []
    for number, call in enumerate(calls):
        for again in (False, True):  # a cycle that is recorded, and one that is known
            loss = call(model, tokens(rank, number)).float().square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                evaluated = calls[(number + again) % len(calls)](model, tokens(rank, number)).float().sum()
            losses += [loss.detach(), evaluated]
    weights = list(gathered(model).values())
    opt.close()
    return losses, weights


def both_stages(rank: int, world_size: int, names: list[str], options: dict[str, Any]) -> None:
    calls = [CALLS[name] for name in names]
    (losses, weights), (of_2, weights_of_2) = train(calls, rank, 3, **options), train(calls, rank, 2)
    assert not difference(losses, of_2)
    assert not difference(weights, weights_of_2)


@pytest.mark.parametrize("options", [{"prefetch": 0}, KEEP], ids=["freed", "kept"])
def test_whatever_is_called_computes_as_stage_2(options: dict[str, Any]) -> None:
    run_ranks(2, both_stages, list(CALLS), options)


@pytest.mark.parametrize("name", CALLS)
def test_a_program_of_one_call(name: str) -> None:
    """No forward of the root comes before it."""
    run_ranks(2, both_stages, [name], {})


def gathers(rank: int, world_size: int, name: str) -> int:
    """In a step, once the order is known."""
    model, opt = make(3)
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
    """The root once, and each of three units for its forward and for its backward, but for the last: it stays, once a
    forward of the root has shown the order."""
    by_the_root = name in ("the root", "the model within", "a part and the rest")
    assert run_ranks(2, gathers, name) == [7 - by_the_root] * 2


def noted(rank: int, world_size: int) -> list[int]:
    """How many calls the schedule has noted, after each step."""
    model, opt = make(3)
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
    zero_optim.shard_module(wrapper, (Scaled,))
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
    model, opt = make(3)
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


def copies(rank: int, world_size: int) -> None:
    """A copy's method is its own."""
    model, opt = make(3)
    with zero_optim.gather_parameters(model):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for ordinary in (copied, pickled):
        with torch.no_grad():
            expected = model.base.classify(tokens(0, 0))
            assert torch.equal(ordinary.base.classify(tokens(0, 0)), expected)
            ordinary.base.temperature.mul_(2)
            assert torch.equal(ordinary.base.classify(tokens(0, 0)), expected / 2)
            assert torch.equal(model.base.classify(tokens(0, 0)), expected)
    opt.close()


def test_copies_are_ordinary_models() -> None:
    run_ranks(2, copies)


class Stop(Exception):
    pass


def raises(rank: int, world_size: int) -> None:
    """In a part, on one rank or on all, forward or backward: the next step is as if it had not been."""
    results = []
    for stage in (3, 2):
        model, opt = make(stage)
        for number, where in enumerate(["embedding", "norm", "blocks.1.up", "blocks.2"]):
            hooked = model.base.get_submodule(where)

            def stop(*_: Any) -> None:
                raise Stop

            hook = hooked.register_forward_hook(stop)
            with pytest.raises(Stop):
                block_by_block(model, tokens(rank, number))
            with pytest.raises(Stop), torch.no_grad():
                module_by_module(model, tokens(rank, number)) if "." in where else model(tokens(rank, number))
                hooked(torch.zeros(1, 12))
            hook.remove()
            opt.zero_grad()
            block_by_block(model, tokens(rank, number)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        results.append(list(gathered(model).values()))
        opt.close()
    assert not difference(*results)


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    run_ranks(2, raises)


def refused(rank: int, world_size: int) -> None:
    model, opt = make(3)
    with pytest.raises(zero_optim.ShardAccessError, match=r"temperature.*register_forward_method"):
        Inner.cooled(model.base, torch.ones(1))
    with pytest.raises(AttributeError, match="Wrapper has no method 'decode' to register"):
        zero_optim.register_forward_method(model, "decode")
    opt.close()


def test_a_method_that_is_not_registered_names_what_to_do() -> None:
    run_ranks(2, refused)
