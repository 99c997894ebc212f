"""`ShardedMuon` on the device: a step waits for nothing, asks the allocator for nothing new, and is captured."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from device_programs import state_of
from places import Place, needs_gpu, on_kernels
from test_capture import captured
from test_no_sync import waits_are_errors
from torch import Tensor, nn
from training_cases import assert_bitwise, copies

import zero_kernels

pytestmark = pytest.mark.gpu

SHAPES = ((96, 320), (320, 96), (64, 64), (3, 40, 24), (90, 33))
STEPS = 6
OVERFLOW = 3  # the step whose gradient holds an inf


class Training:
    """Matrices of several shapes by Muon, and a vector by AdamW, on gradients that are written where they are kept."""

    def __init__(self, place: Place, **options: Any) -> None:
        import zero_optim
        from zero_optim import rules

        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator) for shape in (*SHAPES, (77,))]
        self.params = [nn.Parameter(values.to(place.device, torch.bfloat16)) for values in made]
        *matrices, vector = self.params
        self.lr = torch.tensor(0.02, device=place.device)
        groups = [
            {"params": matrices[:-1], "lr": self.lr},
            {"params": matrices[-1:], "view": {"rows": (40, 30, 20)}},
            {"params": [vector], "rule": rules.AdamW(lr=1e-3)},
        ]
        self.opt = zero_optim.ShardedMuon(groups, lr=0.01, max_grad_norm=1.0, **options)

    def write(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1 + step)
        for parameter in self.params:
            grad = torch.randn(parameter.shape, generator=generator)
            if step == OVERFLOW and parameter is self.params[1]:
                grad[0, 0] = math.inf
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(grad)
        self.lr.fill_(0.02 / (1 + step))

    def found(self) -> list[Tensor]:
        return [*(p.cpu() for p in copies(self.params)), *state_of(self.opt).values()]


@on_kernels
def test_a_steady_step_waits_for_nothing(place: Place) -> None:
    with zero_kernels.use_backend(place.backend):
        training = Training(place)
        for step in range(STEPS):
            training.write(step)
            with waits_are_errors() if step >= 2 else contextlib.nullcontext():
                training.opt.step()
    assert training.opt.stats()["skipped_steps"] == 1
    training.opt.close()


@on_kernels
@pytest.mark.parametrize("form", [{}, {"master": "split8", "state_dtype": "int8"}], ids=["fp32", "small"])
def test_replays_equal_eager_steps(form: dict[str, Any], place: Place) -> None:
    seen = []
    with zero_kernels.use_backend(place.backend):
        for graph in (False, True):
            training = Training(place, **form)
            for step in range(2):
                training.write(step)
                training.opt.step()
            advance = captured(training.opt.step) if graph else training.opt.step
            of_steps = []
            for step in range(2, STEPS):
                training.write(step)
                advance()
                of_steps.append(training.found())
            training.opt.close()
            seen.append(of_steps)
    for number, (eager, replayed) in enumerate(zip(*seen, strict=True)):
        assert_bitwise(replayed, eager, f"step {number + 2}")
    assert_bitwise(seen[0][OVERFLOW - 2], seen[0][OVERFLOW - 3], "after the skipped step")
    assert not torch.equal(seen[0][0][0], seen[0][OVERFLOW - 1][0])


@needs_gpu
@on_kernels
def test_nothing_new_is_asked_of_the_device_after_the_second_step(place: Place) -> None:
    """Temporary tensors come from what torch's allocator has kept, and no more stay."""
    asked, in_use = [], []
    with zero_kernels.use_backend(place.backend):
        training = Training(place)
        for step in range(STEPS):
            training.write(step)
            training.opt.step()
            stats = torch.cuda.memory_stats()
            asked.append(stats["segment.all.allocated"])
            in_use.append(stats["allocated_bytes.all.current"])
    training.opt.close()
    assert asked[2:] == asked[1:2] * (STEPS - 2)
    assert in_use[2:] == in_use[1:2] * (STEPS - 2)


@on_kernels
def test_it_is_the_update_in_float64(place: Place) -> None:
    import oracle_float64

    with zero_kernels.use_backend(place.backend):
        training = Training(place)
        with oracle_float64.watch(training.opt) as watching:
            for step in range(STEPS):
                training.write(step)
                training.opt.step()
            report = watching.report()
    training.opt.close()
    assert report.elements.of_bound <= 1 and report.unrounded == 0, report
    assert report.matrices is not None and report.matrices.of_bound < 1, report
