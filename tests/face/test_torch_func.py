"""``torch.func`` over a model that is trained: what it computes of plain parameters, or one typed error at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from training_cases import assert_bitwise


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)))


X = torch.linspace(-1, 1, 15).reshape(3, 5)


def _by_parameters(model: nn.Module) -> Any:
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return list(grad(lambda values: functional_call(model, values, (X,)).sum())(own).values())


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "jvp": lambda model: jvp(model, (X,), (X + 1,)),
    "jacrev": lambda model: jacrev(model)(X[0]),
    "vmap": lambda model: vmap(model)(X),
    "vmap of grad": lambda model: vmap(grad(lambda x: model(x).sum()))(X),
}


def _tensors(values: Any) -> list[Tensor]:
    return [value.detach().clone() for value in (values if isinstance(values, tuple | list) else [values])]


def _all(model: nn.Module) -> list[Tensor]:
    """By inputs and by parameters."""
    return [t for run in (*TRANSFORMS.values(), _by_parameters) for t in _tensors(run(model))]


def _step(model: nn.Module, opt: Any) -> None:
    model(X).sum().backward()
    opt.step()
    opt.zero_grad()


def _at_stages_0_to_2(rank: int, world_size: int) -> list[list[Tensor]]:
    """Before a step, and between a backward and its step."""
    results = []
    for stage in (0, 1, 2):
        model = _model()
        opt = zero_optim.ShardedAdamW(model.parameters(), stage=stage)
        before = _all(model)
        model(X).sum().backward()
        _all(model)
        opt.step()
        after = _all(model)
        results.append([*before, *after])
        opt.close()
    return results


def test_at_stages_0_to_2_it_works():
    model = _model()
    adamw = torch.optim.AdamW(model.parameters())
    expected = _all(model)
    model(X).sum().backward()
    adamw.step()
    expected += _all(model)
    for of_rank in run_ranks(2, _at_stages_0_to_2):
        for stage, found in enumerate(of_rank):
            torch.testing.assert_close(found, expected, msg=lambda text, stage=stage: f"stage {stage}: {text}")


def _at_stage_3(rank: int, world_size: int) -> tuple[dict[str, str], list[list[Tensor]]]:
    """What transforms of the sharded model raise; what they give of the gathered one, before a step and after it."""
    model = zero_optim.shard_module(_model(), (nn.Linear,))
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    errors, results = {}, []
    for _ in range(2):
        for name, run in TRANSFORMS.items():
            with pytest.raises(zero_optim.ShardAccessError) as caught:
                run(model)
            errors[name] = str(caught.value)
        with pytest.raises(zero_optim.ParameterError) as refused:
            functional_call(model, {name: torch.zeros(p.shape) for name, p in model.named_parameters()}, (X,))
        errors["functional_call"] = str(refused.value)
        with torch.no_grad():
            assert_bitwise([vmap(model)(X)], [model(X)])
        with zero_optim.gather_parameters(model):
            results.append(_all(model))
        _step(model, opt)
    return errors, results


def test_at_stage_3_it_wants_whole_parameters():
    model = _model()
    adamw = torch.optim.AdamW(model.parameters())
    expected = [_all(model)]
    _step(model, adamw)
    expected.append(_all(model))
    for errors, results in run_ranks(2, _at_stage_3):
        for name, text in errors.items():
            assert "torch.func" in text and "gather_parameters(model)" in text, name
        torch.testing.assert_close(results, expected)
