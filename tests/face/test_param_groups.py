"""On several ranks: groups with hyper-parameters of their own that change; tiny, tied and mixed parameters."""

from __future__ import annotations

import pytest
import torch
from cells import halves_of
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    linear_backward,
    make_gradients,
    make_parameters,
)

GROUPS = (
    Hyper(lr=1e-2, weight_decay=0.1),
    Hyper(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
    Hyper(lr=0.0, weight_decay=0.5),
)
MIXED = (torch.float32, torch.bfloat16, torch.float16)


def _group(params: list[nn.Parameter], hyper: Hyper) -> dict[str, object]:
    return {
        "params": params,
        "lr": hyper.lr,
        "betas": hyper.betas,
        "eps": hyper.eps,
        "weight_decay": hyper.weight_decay,
    }


def _hypers(count: int) -> list[Hyper]:
    return [GROUPS[i % 3] for i in range(count)]


def _mixed_parameters() -> list[nn.Parameter]:
    return [make_parameters([shape], MIXED[i % 3], seed=i)[0] for i, shape in enumerate(SHAPES)]


def _train_groups(rank: int, world_size: int, stage: int, cap: float) -> list[Tensor]:
    import zero_optim

    params = _mixed_parameters()
    order = list(range(len(params)))
    groups = [_group([params[i] for i in order if i % 3 == k], hyper) for k, hyper in enumerate(GROUPS)]
    opt = zero_optim.ShardedAdamW(groups, stage=stage, bucket_cap_mb=cap)
    for step in range(4):
        if step == 2:
            opt.param_groups[0]["lr"] *= 0.5  # as a scheduler does
            opt.param_groups[1]["weight_decay"] = 0.2
            opt.param_groups[1]["betas"] = (0.7, 0.9)
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params)


@pytest.mark.parametrize(("cap", "world_size"), halves_of([TINY_CAP_MB, 25.0], [1, 2, 3]))
def test_groups_over_dtypes_with_changing_hyper_parameters(world_size, cap):
    oracle = MasterAdamW(_mixed_parameters(), _hypers(len(SHAPES)))
    for step in range(4):
        if step == 2:
            changed = (
                Hyper(lr=GROUPS[0].lr * 0.5, weight_decay=0.1),
                Hyper(lr=3e-3, betas=(0.7, 0.9), eps=1e-6, weight_decay=0.2),
                GROUPS[2],
            )
            oracle.hypers = [changed[i % 3] for i in range(len(SHAPES))]
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in range(world_size)]))
    for stage in (0, 1, 2) if world_size < 3 else (1, 2):
        for params in run_ranks(world_size, _train_groups, stage, cap):
            assert_bitwise(params, oracle.params, f"stage {stage}")


def _train_tiny(rank: int, world_size: int, stage: int, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    import zero_optim

    params = make_parameters(shapes, torch.bfloat16, seed=rank)
    opt = zero_optim.ShardedAdamW(params, lr=1e-2, stage=stage)
    for step in range(3):
        linear_backward(params, make_gradients(params, rank, step, grid=world_size))
        opt.clip_grad_norm_(1e9)
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params)


@pytest.mark.parametrize("shapes", [((1,),), ((),), ((0,),), ((3,), (0, 4), (1, 1)), ((129,),)], ids=str)
def test_more_ranks_than_elements(shapes):
    oracle = MasterAdamW(make_parameters(shapes, torch.bfloat16), Hyper(lr=1e-2))
    for step in range(3):
        oracle.step(averages([make_gradients(oracle.params, rank, step, grid=4) for rank in range(4)]))
    for stage in (0, 1, 2):
        for params in run_ranks(4, _train_tiny, stage, shapes):
            assert_bitwise(params, oracle.params, f"stage {stage}")


class _Tied(nn.Module):
    """One weight is embedding and output; another is used in two reentrant checkpoints and becomes ready twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding = nn.Embedding(20, 8)
            self.shared = nn.Linear(8, 8)
            self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True) if self.reentrant else self.shared(x)
            x = torch.tanh(x)
        return nn.functional.cross_entropy(self.out(x[:-1]), tokens[1:])


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(20, (12,), generator=torch.Generator().manual_seed(100 * rank + step))


def _train_tied(rank: int, world_size: int, stage: int, reentrant: bool) -> list[Tensor]:
    import zero_optim

    model = _Tied(reentrant)
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    for step in range(4):
        model(_tokens(rank, step)).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    assert model.out.weight is model.embedding.weight
    return copies(model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_tied_weights_and_parameters_that_become_ready_more_than_once(reentrant):
    model = _Tied(reentrant)
    oracle = MasterAdamW(list(model.parameters()), Hyper(lr=1e-2))
    for step in range(4):
        local = []
        for rank in range(2):
            model.zero_grad()
            model(_tokens(rank, step)).backward()
            local.append([p.grad for p in model.parameters()])
        oracle.step(averages(local))
        with torch.no_grad():
            for p, value in zip(model.parameters(), oracle.params, strict=True):
                p.copy_(value)
    for stage in (0, 1, 2):
        for params in run_ranks(2, _train_tied, stage, reentrant):
            if reentrant and stage:  # the first step reduces twice, and rounds once more
                torch.testing.assert_close(list(params), list(oracle.params), rtol=0, atol=2.5e-7)
            else:
                assert_bitwise(params, oracle.params, f"stage {stage}")
