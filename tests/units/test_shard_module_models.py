"""Whatever a model does in its forward and a loop around it, stage 3 computes what stage 2 does, bit for bit.

Each program trains the same model at stage 2, and at stage 3 with units resharded after forward and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from cells import slow_after, slow_where
from harness import run_ranks
from model_zoo import PROGRAMS, REFUSED, WIDTH, Chain, Program, chain_loss, entropy, tokens
from sharded_cases import ON_DISK, Block, gathered
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from training_cases import debugging, difference

KEEP = {"reshard_after_forward": False, "prefetch": 2}


def train(rank: int, program: Program, stage: int, shard: dict[str, Any]) -> list[Tensor]:
    """Losses, then parameters and buffers in full."""
    torch.manual_seed(0)
    model = program.model()
    model = model if program.dtype is None else model.to(program.dtype)
    params = program.params(model)
    if stage == 3:
        zero_optim.shard_module(model, program.units, **shard)
    # The reference reduces after backward: in the first one, gradients that come again would be reduced by themselves.
    overlap = stage == 3
    opt = zero_optim.ShardedAdamW(params, lr=1e-2, stage=None if overlap else stage, overlap_grad_reduce=overlap)
    losses = []
    for step in range(program.steps):
        loss = program.loss(model, rank, step)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
        if program.between is not None:
            program.between(model, opt, rank, step)
    state = gathered(model)
    opt.close()
    return [torch.tensor(losses, dtype=torch.float64), *state.values()]


def parity(rank: int, world_size: int, name: str) -> str:
    """What differs from stage 2; empty where nothing does."""
    program = PROGRAMS[name]
    expected = train(rank, program, 2, {})
    found = []
    for shard, poisoned in (({"prefetch": 1}, True), (KEEP, False)):
        with debugging(poisoned):
            found.append(difference(train(rank, program, 3, shard), expected))
    return "; ".join(filter(None, found))


# Neighbours that stay have each of their settings: checkpoints re-entrant or not, what is frozen, and what is thawed.
SLOW = {
    "checkpoint a block, reentrant",
    "checkpoint within a block, plain",
    "checkpoint the whole model, reentrant",
    "checkpoint segments, plain, within: False",
    "checkpoint segments, plain, within: True",
    "checkpoint segments, reentrant, within: None",
    "units called twice, checkpointed",
    "units within units, all checkpointed",
    "frozen first, thawed one",
    "frozen half, thawed all",
    "frozen most, thawed one",
    "evaluation, no_grad",
    "a loss kept on the unit, frozen",
}


@pytest.mark.parametrize("name", slow_where(SLOW.__contains__, PROGRAMS))
def test_stage_3_is_stage_2(name: str):
    ranks = 3 if "rank" in name else 2
    assert run_ranks(ranks, parity, name) == [""] * ranks


def _returning_parameters(rank: int, world_size: int, name: str) -> None:
    for shard in ({}, KEEP):
        with pytest.raises(zero_optim.ZeroOptimError, match=r"unit 'positions' returned a parameter.*clone"):
            train(rank, REFUSED[name], 3, shard)


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_unit_that_returns_a_parameter_is_refused(name: str):
    run_ranks(2, _returning_parameters, name)


class Passing(Block):
    """Also returns an argument, and what the root has given it as an attribute and by way of the class."""

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (
            super().forward(x) + self.memory,
            first,
            type(self).common if torch._C._current_graph_task_id() < 0 else x,
        )


class Remembering(Chain):
    checkpoints = False

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        first, memory, Passing.common = x, x * 0.5, x * 0.25
        for block in self.blocks:
            block.memory = memory
            x, first, common = checkpoint(block, x, first, use_reentrant=False) if self.checkpoints else block(x, first)
        return x + first + common


def _gathers(rank: int, world_size: int, checkpoints: bool) -> float:
    """Of a step whose backward runs in a thread of its own, which numbers its nodes anew."""
    model = type("N", (Remembering,), {"checkpoints": checkpoints})(partial(Passing, WIDTH))
    zero_optim.shard_module(model, (Block,))
    opt = zero_optim.ShardedAdamW(model.parameters())
    with set_checkpoint_early_stop(False):
        loss = chain_loss(model, rank, 0)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    opt.step()
    calls = opt.stats()["collectives"]["all_gather"]["calls"]
    opt.close()
    return calls


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_others_made_is_no_way_into_a_unit(checkpoints: bool):
    """A unit that its own backward is through with is not gathered again. Two are for the next step."""
    assert run_ranks(2, _gathers, checkpoints) == [1 + 2 * 4 + 2] * 2


# -- several models, some of the ranks, compiled, forward alone -------------------------------------------------------


def _two_owners(rank: int, stage: int) -> list[Tensor]:
    """One model, an optimizer for every other block and one for the rest."""
    torch.manual_seed(0)
    model, first = Chain(), ("blocks.0.", "blocks.2.")
    if stage == 3:
        zero_optim.shard_module(model, (Block,))
    parts = [[(n, p) for n, p in model.named_parameters() if n.startswith(first) is mine] for mine in (True, False)]
    opts = [zero_optim.ShardedAdamW(part, lr=1e-2, stage=None if stage == 3 else stage) for part in parts]
    left: list[float] = []
    model.blocks[0].up.weight.register_hook(
        lambda grad: left.append(opts[0].stats()["collectives"].get("reduce_scatter", {"calls": 0})["calls"])
    )
    for step in range(3):
        chain_loss(model, rank, step).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert stage == 2 or left == [3, 5 + 3, 10 + 3], "a unit of either leaves as soon as the next begins"
    states = list(gathered(model).values())
    for opt in opts:
        opt.close()
    return states


def _two_owners_parity(rank: int, world_size: int) -> str:
    from zero_optim.comm.handle import CommBuffers

    idle, CommBuffers.idle = CommBuffers.idle, property(lambda buffers: True)  # type: ignore[assignment]  # ranks agree
    try:
        return difference(_two_owners(rank, 3), _two_owners(rank, 2))
    finally:
        CommBuffers.idle = idle  # type: ignore[assignment]


def test_two_optimizers_of_one_model():
    assert run_ranks(2, _two_owners_parity) == [""] * 2


def _compile(model: nn.Module, in_place: bool, backend: str) -> None:
    for number, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=backend)
        else:
            model.blocks[number] = torch.compile(block, backend=backend)


def _compiled_parity(rank: int, world_size: int, in_place: bool, before: bool, backend: str) -> str:
    results = []
    for stage in (2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Chain(depth=2)
        if before:
            _compile(model, in_place, backend)
        if stage == 3:
            zero_optim.shard_module(model, (Block,))
        if not before:
            _compile(model, in_place, backend)
        opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2, stage=None if stage == 3 else stage)
        losses = []
        for step in range(3):
            loss = chain_loss(model, rank, step)
            loss.backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                losses += [loss.item(), chain_loss(model, rank, 9).item()]
        results.append([torch.tensor(losses, dtype=torch.float64), *gathered(model).values()])
        opt.close()
    torch._dynamo.reset()
    return difference(*results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_place", "before", "backend"),
    slow_after(
        2, [(True, True, "aot_eager"), (False, False, "aot_eager"), (False, True, "eager"), (True, False, "eager")]
    ),
)
def test_compiled_units(in_place: bool, before: bool, backend: str):
    assert run_ranks(2, _compiled_parity, in_place, before, backend) == [""] * 2


def _forward_alone(rank: int, world_size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batch = Chain().eval(), tokens(0, 0)
    with torch.no_grad():
        expected = model(batch)
    torch.manual_seed(rank)
    model = zero_optim.shard_module(Chain().eval(), (Block,), **options)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert torch.equal(model(batch), expected)
            assert torch.equal(model(batch), expected)
    with torch.inference_mode(), zero_optim.gather_parameters(model):
        assert torch.equal(model(batch), expected)
    with torch.inference_mode():
        assert torch.equal(model(batch), expected)
    assert all(isinstance(parameter, zero_optim.FlatShard) for parameter in model.blocks[0].parameters()) or (
        options == KEEP or world_size == 1
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_forward_alone(ranks: int):
    away = [{"param_offload": where, "prefetch": count} for where in ("cpu", ON_DISK) for count in (1, 3)]
    for options in ({}, KEEP, {"prefetch": 0}, *away, {"param_offload": ON_DISK, "prefetch": 0}):
        run_ranks(ranks, _forward_alone, options)


# -- how an optimizer is given parameters ------------------------------------------------------------------------------

GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "a list": lambda model: list(model.parameters()),
    "an iterator": lambda model: model.parameters(),
    "pairs": lambda model: model.named_parameters(),
    "a view of pairs": lambda model: dict(model.named_parameters()).items(),
    "a view": lambda model: dict(model.named_parameters()).values(),
    "an iterable": lambda model: SimpleIterable(model.parameters()),
    "a group": lambda model: [{"params": model.parameters()}],
    "a group of a view": lambda model: ({"params": dict(model.named_parameters()).items()},),
}


class SimpleIterable:
    """Can be iterated over again, and is neither a list nor an iterator."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)


def _given(rank: int, world_size: int) -> list[str]:
    """What was not taken for the parameters of a sharded model, or trained otherwise than a list of them."""
    wrong, expected = [], []
    for name, give in GIVEN.items():
        torch.manual_seed(0)
        model = zero_optim.shard_module(Chain(), (Block,))
        opt = zero_optim.ShardedAdamW(give(model), lr=1e-2)
        for step in range(2):
            batch = tokens(rank, step)
            entropy(model(batch[:, :-1]), batch).backward()
            opt.step()
            opt.zero_grad()
        weights = list(gathered(model).values())
        expected = expected or weights
        if opt.stage != 3 or difference(weights, expected):
            wrong.append(name)
        opt.close()
    return wrong


def test_an_optimizer_is_given_parameters_by_any_iterable() -> None:
    for wrong in run_ranks(2, _given):
        assert not wrong
