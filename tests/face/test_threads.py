"""Two threads, each with a model and an optimizer of its own: neither touches what the other has under way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from training_cases import Planned, assert_bitwise, copies
from zero_optim.comm import collectives, deadlock
from zero_optim.comm.deadlock import Record
from zero_optim.comm.transport import GLOO, GlooTransport

PATIENCE = 30.0  # seconds: of an event that does not come
STEPS = 3


class Model(nn.Module):
    """``within`` is called in its backward, between the two layers."""

    within: Callable[[], None] | None = None

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 9)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.within is not None:
            hidden.register_hook(lambda grad: self.within())
        return self.second(hidden).pow(2).mean()


def _models(stage: int, world_size: int, *, apart: bool) -> tuple[list[Model], list[Any]]:
    """``apart``: each in a process group of its own."""
    models, opts = [Model(0), Model(1)], []
    for model in models:
        group = dist.new_group() if apart else None
        if stage == 3:
            zero_optim.shard_module(model, (nn.Linear,), process_group=group)
        options: dict[str, Any] = {} if stage == 3 else {"stage": stage, "process_group": group}
        opts.append(zero_optim.ShardedAdamW(model.parameters(), lr=0.1, bucket_cap_mb=0.0005, **options))
    return models, opts


def _train(model: Model, opt: Any, rank: int, step: int) -> None:
    with contextlib.suppress(Planned):
        model(torch.full((2, 12), 0.1 * (1 + rank + step))).backward()
    opt.step()
    opt.zero_grad()


def _in_threads(*programs: Callable[[], None]) -> None:
    """Runs them at once. Raises what any of them raises."""
    errors: list[BaseException] = []

    def run(program: Callable[[], None]) -> None:
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,), daemon=True) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    for error in errors:
        raise error
    assert not any(thread.is_alive() for thread in threads)


def _one_within_the_other(rank: int, world_size: int, stage: int, threads: bool, apart: bool) -> list[Tensor]:
    """The second model is trained while a backward of the first is half over; then that backward raises on a rank."""
    models, opts = _models(stage, world_size, apart=apart)
    half_over, trained = threading.Event(), threading.Event()

    def within() -> None:
        if threads:
            half_over.set()
            assert trained.wait(PATIENCE)
        if rank == world_size - 1:
            raise Planned

    def first() -> None:
        for step in range(STEPS):
            models[0].within = within if step == 1 else None
            _train(models[0], opts[0], rank, step)

    def second() -> None:
        assert not threads or half_over.wait(PATIENCE)
        for step in range(STEPS):
            _train(models[1], opts[1], rank, step)
        trained.set()

    _in_threads(first, second) if threads else (first(), second())
    values = []
    for model, opt in zip(models, opts, strict=True):
        with zero_optim.gather_parameters(model):
            values += copies(list(model.parameters()))
        opt.close()
    return values


@pytest.mark.parametrize(
    ("ranks", "stage", "apart"), [(2, 0, False), (2, 1, False), (2, 2, False), (2, 3, True), (1, 2, False)]
)
def test_each_trains_as_it_does_alone(ranks, stage, apart):
    together = run_ranks(ranks, _one_within_the_other, stage, True, apart)
    alone = run_ranks(ranks, _one_within_the_other, stage, False, apart)
    for rank in range(ranks):
        assert_bitwise(together[rank], alone[rank], f"rank {rank}")


def _each_waits_for_the_other_rank(rank: int, world_size: int) -> None:
    """Rank 0 waits in the first optimizer and rank 1 in the second, until each has looked often enough to be judged."""
    models, opts = _models(2, world_size, apart=False)
    for model, opt in zip(models, opts, strict=True):
        _train(model, opt, rank, 0)  # the first step goes over the group that both were given
    looks, looked = 0, threading.Event()
    look = Record.look

    def counted(self: Record, *args: Any) -> Any:
        nonlocal looks
        found = look(self, *args)
        looks += 1
        if looks > 2 * deadlock.LOOKS:
            looked.set()
        return found

    def early() -> None:
        _train(models[rank], opts[rank], rank, 1)
        looked.set()  # where the other rank was the first to have looked often enough

    def late() -> None:
        assert looked.wait(PATIENCE)
        _train(models[1 - rank], opts[1 - rank], rank, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "SECONDS", 0.05)
        patch.setattr(Record, "look", counted)
        _in_threads(early, late)
    for opt in opts:
        opt.close()


def test_a_thread_is_not_judged_by_where_another_waits():
    run_ranks(2, _each_waits_for_the_other_rank)


def _objects_of_different_optimizers(rank: int, world_size: int) -> str:
    _, opts = _models(2, world_size, apart=False)
    locked: list[bool] = []
    gather = GlooTransport.gather_objects

    def noted(self: GlooTransport, value: object, group: Any) -> list[Any]:
        locked.append(collectives._meetings[group.group_name].locked())
        return gather(self, value, group)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(zero_optim.RankMismatchError) as caught:
        patch.setattr(type(GLOO), "gather_objects", noted)
        opts[rank].engine.sharding.world.gather_objects(None, "zero_grad")
    assert locked == [True]  # another thread would wait
    assert opts[0].engine.sharding.world.gather_objects(rank, "zero_grad") == [0, 1]
    for opt in opts:
        opt.close()
    return str(caught.value)


def test_threads_that_meet_over_one_group_in_other_orders_are_told():
    for text in run_ranks(2, _objects_of_different_optimizers):
        assert "in zero_grad of different optimizers" in text and "process_group=dist.new_group()" in text
