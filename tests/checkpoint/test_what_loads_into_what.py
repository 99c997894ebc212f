"""torch's optimizers go on; never updated and tied parameters load into the optimizers of both kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zero_optim
from compare import same
from small_jobs import network, train
from torch import Tensor, nn
from zero_optim import checkpoint

TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW, a tensor for lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "SGD": lambda p: torch.optim.SGD(p),
    "SGD, momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", TORCHS)
def test_an_optimizer_of_torch_goes_on(tmp_path, name):
    model, other = network(0, torch.float32), network(1, torch.float32)
    opt, its_opt = (TORCHS[name](m.parameters()) for m in (model, other))
    train(model, opt, 2)
    checkpoint.save(tmp_path, model, opt, step=2)
    checkpoint.load(tmp_path, other, its_opt)
    saved, loaded = opt.state_dict(), its_opt.state_dict()
    for index, entry in saved["state"].items():
        assert all(same(loaded["state"][index][kind], value) for kind, value in entry.items())
    for one in (model, opt), (other, its_opt):
        train(*one, 2)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


class _Three(nn.Module):
    def __init__(self, seed: int, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))
        self.third = self.first if tied else nn.Parameter(torch.randn(5, 3))


def _three(
    rule: str, seed: int, unused: tuple[str, ...] = (), steps: int = 1, **options: bool
) -> tuple[nn.Module, Any]:
    model = _Three(seed, **options)
    opt: Any = (
        zero_optim.ShardedAdamW(model.named_parameters())
        if rule == "sharded"
        else torch.optim.AdamW(model.parameters())
    )
    for _ in range(steps):
        sum((p * p).sum() for name, p in model.named_parameters() if p.requires_grad and name not in unused).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def _moments(opt: Any) -> list[Tensor]:
    state = zero_optim.full_state_dict(opt) if isinstance(opt, zero_optim.ShardedAdamW) else opt.state_dict()
    return [state["state"][index]["exp_avg"] for index in sorted(state["state"])]


RULES = ("sharded", "adamw")


@pytest.mark.parametrize("target", RULES)
@pytest.mark.parametrize("source", RULES)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_that_was_never_updated_is_not_missed(tmp_path, source, target, steps):
    """As a strict load does not count such a state where it is left over."""
    model, opt = _three(source, 0, unused=("second",), steps=steps)
    other, its_opt = _three(target, 1, steps=0)
    checkpoint.save(tmp_path, model, opt, step=steps)
    checkpoint.load(tmp_path, other, its_opt)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("target", RULES)
@pytest.mark.parametrize("strict", [True, False])
def test_where_a_tie_is_gone_both_get_the_saved_values(tmp_path, target, strict):
    model, opt = _three("sharded", 0, tied=True)
    checkpoint.save(tmp_path, model, opt)
    other, its_opt = _three(target, 1)
    checkpoint.load(tmp_path, other, its_opt, strict=strict)
    assert same(
        [p.detach() for p in other.parameters()], [model.first.detach(), model.second.detach(), model.first.detach()]
    )
    saved = _moments(opt)
    assert same(_moments(its_opt), [saved[0], saved[1], saved[0]])
