"""From param groups to rows of the hyper table: a factor for each parameter, `maximize`, and room for more of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from zero_optim.rules.kernel_rule import SGD, AdamW
from zero_optim.step.hyper_table import HyperTable

import zero_kernels
from zero_kernels import HYPER_COLUMNS

FACTOR = HYPER_COLUMNS.index("grad_factor")
GROUP_OF = (0, 1, 1)
RULE = AdamW()


def groups(**second: Any) -> list[dict[str, Any]]:
    usual = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return [usual, usual | {"lr": 1e-2} | second]


def rows(steps: list[int], of: tuple[int, ...], settings: list[dict[str, Any]]) -> Tensor:
    """What `hyper_table` makes of the same settings, a row a parameter."""
    each = [settings[group] for group in of]
    return torch.cat([zero_kernels.hyper_table(**group, step=step) for group, step in zip(each, steps, strict=True)])


def test_a_factor_multiplies_its_column_alone_and_for_one_step() -> None:
    table, active = HyperTable(GROUP_OF, [RULE, RULE], torch.device("cpu")), torch.ones(3, dtype=torch.bool)
    factor = torch.tensor([0.37, 1.0, 0.0])
    table.advance(groups(maximize=True), active, factor)
    want = rows([1] * 3, GROUP_OF, groups(maximize=True))
    want[:, FACTOR] = torch.tensor([0.37, -1.0, -0.0])
    assert torch.equal(table.tables[RULE], want)
    table.advance(groups(maximize=True), active)
    assert torch.equal(table.tables[RULE], rows([2] * 3, GROUP_OF, groups(maximize=True)))
    table.advance(groups(), active)
    assert torch.equal(table.tables[RULE][:, FACTOR], torch.ones(3)), "maximize is read at every step"


def test_growing_keeps_the_steps_and_gives_new_groups_their_numbers() -> None:
    table = HyperTable(GROUP_OF, [RULE, RULE], torch.device("cpu"))
    table.advance(groups(), torch.tensor([True, False, True]))
    table.advance(groups(), torch.tensor([True, False, True]))
    more, of = [*groups(), groups(lr=torch.tensor(0.5), maximize=True)[1]], (*GROUP_OF, 2, 0)
    table.grow(of, [RULE] * 3)
    assert table.steps.tolist() == [2, 0, 2, 0, 0]
    table.advance(more, torch.ones(5, dtype=torch.bool))
    assert table.steps.tolist() == [3, 1, 3, 1, 1]
    assert torch.equal(table.tables[RULE], rows([3, 1, 3, 1, 1], of, more))


def test_groups_of_two_rules_may_take_turns() -> None:
    sgd, settings = SGD(), [{**groups()[0], "lr": float(n), "momentum": 0.5, "dampening": 0.0} for n in range(1, 6)]
    together = HyperTable(range(5), [RULE, sgd, sgd, RULE, sgd], torch.device("cpu"))
    together.advance(settings, torch.ones(5, dtype=torch.bool))
    for rule, own in ((RULE, [0, 3]), (sgd, [1, 2, 4])):
        alone = HyperTable(range(len(own)), [rule] * len(own), torch.device("cpu"))
        alone.advance([settings[group] for group in own], torch.ones(len(own), dtype=torch.bool))
        assert torch.equal(together.tables[rule][own], alone.tables[rule])
