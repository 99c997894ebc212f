"""When a backward counts as running."""

from __future__ import annotations

import pytest
import torch
from training_cases import Planned, raise_in_backward
from zero_optim.recovery import BackwardWatch


@pytest.mark.slow
def test_none_runs_outside_though_its_task_lives():
    """As on a GPU, whose thread may hold the task of a backward after the caller of one that raised knows it."""
    seen: list[object] = []
    watch = BackwardWatch(lambda: seen.append("begins"), lambda: seen.append("ends"))
    tasks: list[object] = []

    def hook(grad: torch.Tensor) -> None:
        watch.enter()
        seen.append(watch.running)
        tasks.extend(end() for end in watch._open.values())

    y = raise_in_backward(torch.ones((), requires_grad=True)) * 2.0
    y.register_hook(hook)
    with pytest.raises(Planned):
        y.backward()
    assert seen == ["begins", True]
    assert tasks and not watch.running
