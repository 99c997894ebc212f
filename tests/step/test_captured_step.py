"""A step that is captured into a CUDA graph, as far as it shows without a GPU: what it sends, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import zero_optim
from guards import OpLog
from training_cases import assert_bitwise, linear_backward, make_gradients, make_parameters

SHAPES = ((40, 7), (300,), (3,))


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A switch: while it holds True, the modules that ask believe that a capture is on."""
    switch = [False]
    for module in ("step.hyper_table", "step.exchange"):
        monkeypatch.setattr(f"zero_optim.{module}.is_capturing", lambda device: switch[0])
    return switch


def _train(capturing: list[bool], captured_from: int, unused: int | None) -> list[torch.nn.Parameter]:
    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW([{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:]}])
    for step in range(5):
        capturing[0] = step >= captured_from
        opt.zero_grad()
        gradients = make_gradients(params, 0, step)
        if unused is not None:
            gradients[unused] = None
        linear_backward(params, gradients)
        opt.clip_grad_norm_(1.0)
        for group in opt.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        opt.step()
    return params


@pytest.mark.parametrize("unused", [None, 1])
def test_a_captured_step_gives_the_bits_of_any_other(capturing: list[bool], unused: int | None) -> None:
    eager = _train(capturing, 5, unused)
    assert_bitwise(eager, _train(capturing, 2, unused))


def test_a_captured_step_copies_nothing_from_the_host(capturing: list[bool]) -> None:
    """A replay would read memory that is long gone. The host's numbers go into kernels, as fills."""
    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, lr=torch.tensor(1e-2))
    for step in range(2):
        linear_backward(params, make_gradients(params, 0, step))
        opt.param_groups[0]["weight_decay"] = 0.1 * step
    capturing[0] = True
    with OpLog() as log, pytest.raises(ValueError, match="lr of group 0 is a tensor on cpu.*move it to cpu"):
        opt.step()
    assert not {"aten::lift_fresh", "aten::_pin_memory"} & set(log.names)


def test_numbers_are_sent_when_they_change_alone() -> None:
    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, lr=1e-2)
    sent = []
    for step in range(4):
        linear_backward(params, make_gradients(params, 0, step))
        if step == 2:
            opt.param_groups[0]["lr"] = 1e-3
        with OpLog() as log:
            opt.step()
        sent.append(log.names["aten::lift_fresh"])
        opt.zero_grad()
    assert sent[1] == sent[3] < sent[2] <= sent[0]
