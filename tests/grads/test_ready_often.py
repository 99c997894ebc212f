"""Parameters that become ready more than once: shared modules, re-entrant checkpoints, several backwards a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import zero_optim
from cells import covering, slow
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, averages
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    make_parameters,
    maybe_no_sync,
    named,
)

LR = 1e-2
STEPS = 3
WIDTH = 12
LAYERS = 4


def _model(seed: int = 0) -> list[nn.Parameter]:
    """A matrix and a vector a layer."""
    return make_parameters(((WIDTH, WIDTH), (WIDTH,)) * LAYERS, seed=seed)


def _input(rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(5, WIDTH, generator=generator)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x @ weight / WIDTH + bias)


def _checkpointed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The layer as a module's: its parameters are no arguments, so the inner backward makes them ready."""
    return checkpoint(lambda x: _layer(x, weight, bias), x, use_reentrant=True)


Forward = Callable[[list[Tensor], Tensor, int, int], Tensor]


def _everything_checkpointed(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """Every parameter's gradient comes from the inner backward of a re-entrant checkpoint."""
    x = x.requires_grad_()
    for i in range(LAYERS):
        x = _checkpointed(x, params[2 * i], params[2 * i + 1])
    return x.square().sum()


def _layers_used_again(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """Two passes over the layers, each layer a re-entrant checkpoint: every gradient becomes ready twice."""
    x = x.requires_grad_()
    for i in list(range(LAYERS)) * 2:
        x = _checkpointed(x, params[2 * i], params[2 * i + 1])
    return x.square().sum()


def _half_checkpointed(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """Every other layer in a checkpoint; some of the inner backwards come after all outer hooks."""
    x = x.requires_grad_()
    for i in range(LAYERS):
        arguments = (x, params[2 * i], params[2 * i + 1])
        x = _checkpointed(*arguments) if i % 2 else _layer(*arguments)
    return x.square().sum()


def _nested(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """A checkpoint within a checkpoint."""

    def pair(x: Tensor, i: int) -> Tensor:
        return _layer(_checkpointed(x, params[i], params[i + 1]), params[i + 2], params[i + 3])

    x = x.requires_grad_()
    for i in range(0, 2 * LAYERS, 4):
        x = checkpoint(pair, x, i, use_reentrant=True)
    return x.square().sum()


def _shared_without_checkpoint(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """A layer used several times, more often on rank 1 and in later steps: autograd adds up, it is ready once."""
    for i in [0, *[1] * (1 + rank + step), 2, 3]:
        x = _layer(x, params[2 * i], params[2 * i + 1])
    return x.square().sum()


def _checkpointed_on_one_rank(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """Ready twice on rank 1, once on the others, from the first backward on."""
    return (_layers_used_again if rank == 1 else _layers_plain_twice)(params, x, rank, step)


def _layers_plain_twice(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    for i in list(range(LAYERS)) * 2:
        x = _layer(x, params[2 * i], params[2 * i + 1])
    return x.square().sum()


def _less_often_later(params: list[Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """Ready twice in the backward that is observed, once in later ones."""
    return (_layers_used_again if step == 0 else _layers_plain_twice)(params, x, rank, step)


FORWARDS: dict[str, Forward] = {
    "everything checkpointed": _everything_checkpointed,
    "layers used again": _layers_used_again,
    "half checkpointed": _half_checkpointed,
    "nested": _nested,
    "shared without checkpoint": _shared_without_checkpoint,
    "checkpointed on one rank": _checkpointed_on_one_rank,
    "less often later": _less_often_later,
}
# In the first backward of these gradients come again after their buckets have left: the step reduces a second time.
REPEATED = {"layers used again", "checkpointed on one rank", "less often later"}
# Whether each backward of a step is synchronised.
ACCUMULATIONS = {"one": (True,), "two": (True, True), "no_sync before": (False, True), "no_sync alone": (False, False)}


def _train(rank: int, forward: str, accumulation: str, stage: int, overlap: bool) -> list[Tensor]:

    params = _model()
    opt = zero_optim.ShardedAdamW(
        named(params), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB, overlap_grad_reduce=overlap
    )
    for step in range(STEPS):
        for micro, synced in enumerate(ACCUMULATIONS[accumulation]):
            with maybe_no_sync(opt, not synced):
                FORWARDS[forward](params, _input(rank, step, micro), rank, step).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params)


def _train_all(
    rank: int, world_size: int, accumulation: str, cells: Sequence[tuple[str, tuple[int, bool]]]
) -> list[list[Tensor]]:
    return [_train(rank, forward, accumulation, *setting) for forward, setting in cells]


def _local_gradients(params: list[Tensor], loss: Tensor, before: list[Tensor] | None = None) -> list[Tensor]:
    """What autograd adds up to, from ``before`` on; a gradient that becomes ready twice is added twice."""
    for p, start in zip(params, before or [None] * len(params), strict=True):
        p.grad = start
    loss.backward()
    return [p.grad for p in params]


def _expected(forward: str, accumulation: str, world_size: int) -> dict[bool, list[Tensor]]:
    """Parameters after all steps, by whether each synchronised backward is reduced by itself.

    Without overlap stage 1 adds up on each rank until ``step``: sums in another order.
    """
    results = {}
    for by_itself in (True, False):
        params = _model()
        oracle = MasterAdamW(params, Hyper(lr=LR))
        for step in range(STEPS):
            local: list[Any] = [None] * world_size
            total = None
            for micro, synced in enumerate(ACCUMULATIONS[accumulation]):
                for rank in range(world_size):
                    x = _input(rank, step, micro)
                    loss = FORWARDS[forward](params, x, rank, step)
                    local[rank] = _local_gradients(params, loss, local[rank])
                if (synced and by_itself) or micro == len(ACCUMULATIONS[accumulation]) - 1:
                    total = accumulate(total, averages(local))
                    local = [None] * world_size
            oracle.step(total or [])
            with torch.no_grad():
                for p, value in zip(params, oracle.params, strict=True):
                    p.copy_(value)
        results[by_itself] = oracle.params
    return results


SETTINGS = ((0, True), (1, True), (1, False), (2, True), (2, False))  # stage and overlap
CELLS = list(itertools.product(ACCUMULATIONS, FORWARDS, SETTINGS))
IN_PAIRS = covering(CELLS)


@pytest.mark.parametrize("in_pairs", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_backwards_in_which_parameters_become_ready_often(accumulation, in_pairs):
    cells = [cell[1:] for cell in CELLS if cell[0] == accumulation and (cell in IN_PAIRS) is in_pairs]
    results = run_ranks(2, _train_all, accumulation, cells, timeout=90)
    expected = {forward: _expected(forward, accumulation, 2) for forward, _ in cells}
    for rank, result in enumerate(results):
        for (forward, (stage, overlap)), params in zip(cells, result, strict=True):
            what = f"{forward}, {accumulation}, stage {stage}, overlap {overlap}, rank {rank}"
            if stage and overlap and forward in REPEATED:
                for found, value in zip(params, expected[forward][True], strict=True):
                    torch.testing.assert_close(found, value, rtol=0, atol=2.5e-7, msg=what)
            else:
                assert_bitwise(params, expected[forward][stage != 1 or overlap], what)


# -- ready more often than observed ------------------------------------------------------------------------------------


def _more_often(rank: int, world_size: int, stage: int, culprits: tuple[int, ...]) -> tuple[str, str, list[Tensor]]:
    """After two plain steps, some ranks use every layer in two checkpoints. Then the count starts anew."""

    params = _model()
    opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    for step in range(2):
        _layers_plain_twice(params, _input(rank, step, 0), rank, step).backward()
        opt.step()
        opt.zero_grad()
    (_layers_used_again if rank in culprits else _layers_plain_twice)(params, _input(rank, 9, 0), rank, 9).backward()
    kind = text = ""
    try:
        opt.step()
    except RuntimeError as error:
        kind, text = type(error).__name__, str(error)
    opt.zero_grad()
    opt.observe()
    for step in (2, 3):
        _layers_used_again(params, _input(rank, step, 0), rank, step).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return kind, text, copies(params)


@pytest.mark.parametrize("culprits", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ready_more_often_than_observed_fails_on_every_rank_until_observed_anew(stage, culprits):
    params = _model()
    oracle = MasterAdamW(params, Hyper(lr=LR))
    for step in range(4):
        forward = _layers_plain_twice if step < 2 else _layers_used_again
        local = [_local_gradients(params, forward(params, _input(rank, step, 0), rank, step)) for rank in range(2)]
        oracle.step(averages(local))
        with torch.no_grad():
            for p, value in zip(params, oracle.params, strict=True):
                p.copy_(value)
    results = run_ranks(2, _more_often, stage, culprits, timeout=40)
    assert len({(kind, text) for kind, text, _ in results}) == 1, "every rank says the same"
    for kind, text, own in results:
        assert kind == "GradientError", f"{kind or 'nothing raised'} {text}"
        assert "layer" in text and "observe()" in text
        assert_bitwise(own, oracle.params, "after observe()")


# -- the first backward ------------------------------------------------------------------------------------------------


def _first_backwards(rank: int, world_size: int, stage: int) -> tuple[list[int], int, int]:
    """How many buckets have left when the last gradient comes, in the first backward and the third, all buckets, and
    how many reductions the first step has made."""

    params = _model()
    opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    left: list[int] = []
    params[0].register_hook(lambda grad: left.append(opt.engine.reducer.rounds.next))
    for step in range(3):
        _layers_plain_twice(params, _input(rank, step, 0), rank, step).backward()
        opt.step()
        opt.zero_grad()
        if step == 0:
            kind = "reduce_scatter" if stage else "all_reduce"
            reductions = opt.stats()["collectives"][kind]["calls"]
    buckets = opt.stats()["buckets"]
    opt.close()
    return [left[0], left[-1]], buckets, reductions


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_leave_in_the_first_backward(stage: int) -> None:
    for (first, third), buckets, reductions in run_ranks(2, _first_backwards, stage):
        assert third == buckets - 1 >= 2 and reductions == buckets
        assert first == (buckets - 1 if stage else 0)
