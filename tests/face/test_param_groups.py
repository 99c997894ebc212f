"""On several ranks: groups with hyper-parameters of their own that change; tiny, tied and mixed parameters. Groups that
``param_groups`` makes, against AdamW's."""

from __future__ import annotations

import pytest
import torch
import zero_optim
from cells import halves_of
from harness import run_ranks
from oracle import Hyper, MasterAdamW, adamw_bound, averages
from torch import Tensor, nn
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


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(20, (12,), generator=torch.Generator().manual_seed(100 * rank + step))


# -- param_groups ------------------------------------------------------------------------------------------------------


OVERRIDES = [
    ("*.bias", {"weight_decay": 0.0}),
    (lambda name, parameter: parameter.ndim < 2, {"weight_decay_mult": 0.5}),
    ("layers.*", {"lr_mult": 0.5}),
    ("layers.0.*", {"lr_mult": 0.5, "betas": (0.8, 0.9)}),
    ("head.weight", {"eps": 1e-6}),
]
GIVEN = {"lr": 1e-2, "weight_decay": 0.1}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[2].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.embedding(tokens)))[:-1], tokens[1:])


def _train_named(rank: int, world_size: int, stage: int | None) -> tuple[list[dict[str, object]], list[Tensor]]:
    """``stage`` None: torch's AdamW. Ranks have the same batches, so that gradients are those of one rank."""
    model = _Net()
    if stage == 3:
        zero_optim.shard_module(model, units=(nn.Linear,))
    groups = zero_optim.param_groups(model, OVERRIDES, **GIVEN)
    made = [{**group, "params": [name for name, _ in group["params"]]} for group in groups]
    opt = torch.optim.AdamW(groups) if stage is None else zero_optim.ShardedAdamW(groups, stage=stage)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1))
    for step in range(3):
        model(_tokens(0, step)).backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    state = model.state_dict() if stage is None else zero_optim.full_model_state_dict(model, rank=None)
    return made, [state[name] for name, _ in model.named_parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_by_name_train_as_with_adamw(stage):
    expected_groups, expected = _train_named(0, 1, None)
    half = {"lr": 0.005, "weight_decay": 0.1}
    assert expected_groups == [
        {"params": ["embedding.weight"], **GIVEN, "eps": 1e-6},
        {"params": ["layers.0.weight"], "lr": 0.0025, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": ["layers.0.bias"], "lr": 0.0025, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": ["layers.2.weight"], **half},
        {"params": ["layers.2.bias", "layers.3.bias"], **half, "weight_decay": 0.0},
        {"params": ["layers.3.weight"], **half, "weight_decay": 0.05},
    ]
    for made, params in run_ranks(2, _train_named, stage):
        assert made == expected_groups
        for ours, torchs in zip(params, expected, strict=True):
            assert ((ours - torchs).abs() <= 8 * adamw_bound(torchs, 1e-2, 3)).all()


def test_a_rule_brings_its_own_defaults():
    rule = zero_optim.rules.Lion(lr=0.02)
    lion, adamw = zero_optim.param_groups(_Net(), {"embedding.*": {"rule": rule, "lr_mult": 0.5}}, **GIVEN)
    assert (lion["lr"], lion["weight_decay"], adamw["lr"]) == (0.01, 0.0, 1e-2)
    assert zero_optim.param_groups(_Net().named_parameters(), [("gone", {"lr": 1.0})], strict=False)[0].keys() == {
        "params"
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("layer.0.*", {"lr": 1.0})], "override 0, 'layer.0.*', matches no parameter: there are layers.0"),
        ([("*", {}), (lambda name, p: False, {})], "override 1, <function .* matches no parameter"),
        ([("*", {"weigth_decay": 0.0})], "unknown option 'weigth_decay': is 'weight_decay' meant"),
        ([("*.bias", {"eps_mult": 2.0})], "eps_mult of 'layers.0.bias' multiplies eps, which has no value"),
    ],
)
def test_overrides_that_cannot_be_meant(overrides, message):
    with pytest.raises(ValueError, match=message):
        zero_optim.param_groups(_Net(), overrides, **GIVEN)
