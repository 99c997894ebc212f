"""``state_for_muon``: the momentum of AdamW and SGD goes on as Muon's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from zero_optim import StateMismatchError, rules
from zero_optim.rules import Int8

STEPS = 4
Optimizer = Callable[..., torch.optim.Optimizer]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 7)).to(dtype)


def gradient(parameter: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(parameter.numel() + 1000 * step)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def take_steps(model: nn.Module, opt: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = gradient(parameter, step)
        opt.step()


def make_muon(model: nn.Module, others: rules.UpdateRule, **options: Any) -> zero_optim.ShardedMuon:
    """The groups have another order than the model, as a change of recipe brings it."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    rest = [(name, p) for name, p in model.named_parameters() if p.dim() < 2]
    return zero_optim.ShardedMuon([{"params": rest, "rule": others}, {"params": matrices}], lr=0.02, **options)


def momenta(opt: zero_optim.ShardedOptimizer) -> dict[str, Tensor]:
    state = zero_optim.full_state_dict(opt)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return {names[i]: entry["momentum_buffer"] for i, entry in state["state"].items() if "momentum_buffer" in entry}


def averages(model: nn.Module, beta: float) -> dict[str, Tensor]:
    """Of the gradients of all steps, from zero on."""
    found = {}
    for name, parameter in model.named_parameters():
        total = sum(
            (1 - beta) * beta ** (STEPS - 1 - step) * gradient(parameter, step).double() for step in range(STEPS)
        )
        found[name] = torch.as_tensor(total)
    return found


ADAM = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.0}
SGD = {"lr": 0.01, "momentum": 0.8}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, ADAM),
        (torch.optim.Adam, ADAM),
        (torch.optim.SGD, SGD),
        (torch.optim.SGD, {**SGD, "nesterov": True}),
        (zero_optim.ShardedAdamW, ADAM),
        (zero_optim.ShardedSGD, SGD),
    ],
)
def test_the_momentum_is_the_average_of_gradients(optimizer: Optimizer, options: dict[str, Any]) -> None:
    model = make_model()
    before = optimizer(model.named_parameters(), **options)
    take_steps(model, before, range(STEPS))
    ours = isinstance(before, zero_optim.ShardedOptimizer)
    saved = zero_optim.full_state_dict(before) if ours else before.state_dict()
    if ours:
        before.close()
    muon = make_muon(model, rules.AdamW(lr=0.01))
    zero_optim.load_full_state_dict(muon, zero_optim.state_for_muon(muon, saved))
    found, wanted = momenta(muon), averages(model, 0.8)
    assert found.keys() == {"0.weight", "1.weight"}
    for name, momentum in found.items():
        torch.testing.assert_close(momentum.double(), wanted[name], rtol=1e-5, atol=1e-6)
    assert [group["lr"] for group in muon.param_groups] == [0.01, 0.02]


def test_dampening_is_taken_out() -> None:
    """Each gradient but the first counts by 1 - dampening in torch's sum."""
    model = make_model()
    before = torch.optim.SGD(model.named_parameters(), lr=0.01, momentum=0.8, dampening=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before.step()
    take_steps(model, before, range(STEPS))
    muon = make_muon(model, rules.AdamW(lr=0.01))
    zero_optim.load_full_state_dict(muon, zero_optim.state_for_muon(muon, before.state_dict()))
    wanted = averages(model, 0.8)
    for name, momentum in momenta(muon).items():
        torch.testing.assert_close(momentum.double(), wanted[name], rtol=1e-5, atol=1e-6)


def test_what_adamw_updates_goes_on_as_it_was() -> None:
    trained, other = make_model(), make_model()
    torchs = torch.optim.AdamW(trained.named_parameters(), lr=0.01, weight_decay=0.1)
    take_steps(trained, torchs, range(STEPS))
    other.load_state_dict(trained.state_dict())
    muon = make_muon(other, rules.AdamW(lr=0.01, weight_decay=0.1))
    zero_optim.load_full_state_dict(muon, zero_optim.state_for_muon(muon, torchs.state_dict()))
    take_steps(trained, torchs, [STEPS])
    take_steps(other, muon, [STEPS])
    for (name, ours), theirs in zip(other.named_parameters(), trained.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-7) == (ours.dim() < 2), name


def _on_ranks(rank: int, world_size: int) -> None:
    """Rank 0 converts. Masters stay, to the last bit; what SGD did not keep of AdamW's begins anew."""
    model = make_model(torch.bfloat16)
    sgd = zero_optim.ShardedSGD(model.named_parameters(), **SGD)
    take_steps(model, sgd, range(STEPS))
    saved = zero_optim.full_state_dict(sgd, rank=None)
    sgd.close()
    muon = make_muon(model, rules.AdamW(lr=0.01).with_codecs({"exp_avg": Int8()}), stage=2)
    zero_optim.load_full_state_dict(muon, zero_optim.state_for_muon(muon, saved) if rank == 0 else None)
    state = zero_optim.full_state_dict(muon, rank=None)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    of_sgd = dict(zip(saved["param_groups"][0]["param_names"], saved["state"].values(), strict=True))
    assert {names[index] for index in state["state"]} == {"0.weight", "1.weight"}  # the others had no update yet
    for index, entry in state["state"].items():
        assert torch.equal(entry["master"], of_sgd[names[index]]["master"])
    take_steps(model, muon, [STEPS])
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_ranks_load_what_rank_0_has_converted() -> None:
    run_ranks(2, _on_ranks)


def test_muons_own_state_stays() -> None:
    model = make_model()
    muon = make_muon(model, rules.AdamW(lr=0.01))
    take_steps(model, muon, range(STEPS))
    before = momenta(muon)
    zero_optim.load_full_state_dict(muon, zero_optim.state_for_muon(muon, zero_optim.full_state_dict(muon)))
    after = momenta(muon)
    assert all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()


def test_what_cannot_be_converted_is_told() -> None:
    model = make_model()
    muon = make_muon(model, rules.AdamW(lr=0.01))
    unnamed = torch.optim.AdamW(model.parameters())
    uphill = torch.optim.AdamW(model.named_parameters(), maximize=True)
    for opt in (unnamed, uphill):
        take_steps(model, opt, [0])
    with pytest.raises(StateMismatchError, match=r"parameter 0 of the state has no name .*model.named_parameters\(\)"):
        zero_optim.state_for_muon(muon, unnamed.state_dict())
    with pytest.raises(StateMismatchError, match="0.weight was trained with maximize=True"):
        zero_optim.state_for_muon(muon, uphill.state_dict())
    muon.close()
    nameless = zero_optim.ShardedMuon([p for p in model.parameters() if p.dim() > 1])
    with pytest.raises(StateMismatchError, match="parameter 0 of the optimizer has no name"):
        zero_optim.state_for_muon(nameless, unnamed.state_dict() | {"state": {}})


def test_a_momentum_in_fewer_bits_is_not_left_out() -> None:
    model = make_model()
    adamw = zero_optim.ShardedAdamW(model.named_parameters(), state_dtype="int8")
    take_steps(model, adamw, [0])
    saved, full = adamw.state_dict(), zero_optim.full_state_dict(adamw)
    adamw.close()
    muon = make_muon(model, rules.AdamW(lr=0.01))
    with pytest.raises(StateMismatchError, match="exp_avg of 0.weight is in fewer bits than fp32: give the state"):
        zero_optim.state_for_muon(muon, saved)
    zero_optim.load_full_state_dict(muon, zero_optim.state_for_muon(muon, full))
    assert all(momentum.any() for momentum in momenta(muon).values())


def _parts(rank: int, world_size: int) -> None:
    model = make_model()
    adamw = zero_optim.ShardedAdamW(model.named_parameters(), stage=1)
    take_steps(model, adamw, [0])
    saved = adamw.state_dict()
    adamw.close()
    muon = make_muon(model, rules.AdamW(lr=0.01))
    with pytest.raises(StateMismatchError, match="is a part: give the state that zero_optim.full_state_dict gave"):
        zero_optim.state_for_muon(muon, saved)


def test_a_rank_s_own_state_is_refused() -> None:
    run_ranks(2, _parts)
