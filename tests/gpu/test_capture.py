"""`step` in a CUDA graph: what changes between replays is read on the device, and the bits are the eager run's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from device_programs import SMALL_CAP_MB, on, parameters, state_of
from places import ON_GPU, Place, on_kernels
from torch import Tensor
from training_cases import assert_bitwise, copies, linear_loss, make_gradients

import zero_kernels

pytestmark = pytest.mark.gpu

WARM_UP = 3
REPLAYS = 6
OVERFLOW = 2  # the replay whose gradient holds an inf
LRS = (1e-3, 1e-3, 5e-4, 2e-3, 0.0, 1e-2)
SCALES = (64.0, 128.0, 128.0, 16.0, 16.0, 16.0)


def captured(work: Callable[[], None], stream: Any = None) -> Callable[[], None]:
    """`work` as a graph to replay. Nothing runs at capture. A CPU has no graphs: there it is `work` itself."""
    if not ON_GPU:
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    torch.cuda.synchronize()
    return graph.replay


@dataclass
class Training:
    """One optimizer on gradients that are written where it keeps them; `lr` and the scale are device tensors."""

    dtype: torch.dtype
    scaled: bool
    place: Place
    max_grad_norm: float | None

    def __post_init__(self) -> None:
        import zero_optim

        self.params = parameters(self.dtype, self.place.device)
        self.lr = torch.tensor(1e-3, device=self.place.device)
        self.opt: Any = zero_optim.ShardedAdamW(
            self.params, lr=self.lr, max_grad_norm=self.max_grad_norm, bucket_cap_mb=SMALL_CAP_MB
        )
        self.scaler = zero_optim.GradScaler(self.place.device, SCALES[0], growth_interval=100, enabled=self.scaled)
        self.scaler.scale(torch.zeros((), device=self.place.device))  # makes the scale's tensor
        for step in range(WARM_UP):
            self.write(self.gradients(step, SCALES[0]))
            self.step()

    def step(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()

    def gradients(self, step: int, scale: float) -> list[Tensor]:
        """Gradients of a loss times `scale`, exact in every dtype."""
        grads = make_gradients(self.params, 0, step, grid=2)
        if step == WARM_UP + OVERFLOW:
            grads[-1].view(-1)[1234] = math.inf
        return on(self.place.device, [grad * (scale if self.scaled else 1.0) for grad in grads])

    def write(self, grads: list[Tensor]) -> None:
        for parameter, grad in zip(self.params, grads, strict=True):
            if parameter.grad is None:
                parameter.grad = grad.clone()
            else:
                parameter.grad.copy_(grad)

    def run(self, advance: Callable[[], None]) -> list[dict[str, Any]]:
        """Parameters, state, loss scale and skipped steps after each replay."""
        seen = []
        for replay in range(REPLAYS):
            self.lr.fill_(LRS[replay])
            if self.scaled:
                self.scaler.update(SCALES[replay])
            self.write(self.gradients(WARM_UP + replay, SCALES[replay]))
            advance()
            seen.append(
                {
                    "params": [p.cpu() for p in copies(self.params)],
                    "state": state_of(self.opt),
                    "scale": self.scaler.get_scale(),
                    "skipped": self.opt.stats()["skipped_steps"],
                }
            )
        self.opt.close()
        return seen


@on_kernels
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("dtype", "scaled"), [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False)], ids=str
)
def test_replays_equal_eager_steps(dtype: torch.dtype, scaled: bool, max_grad_norm: float | None, place: Place) -> None:
    with zero_kernels.use_backend(place.backend):
        eager = Training(dtype, scaled, place, max_grad_norm)
        want = eager.run(eager.step)
        graphed = Training(dtype, scaled, place, max_grad_norm)
        got = graphed.run(captured(graphed.step))
    for replay, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a["params"], b["params"], f"parameters after replay {replay}")
        assert_bitwise(list(a["state"].values()), list(b["state"].values()), f"state after replay {replay}")
        assert (a["scale"], a["skipped"]) == (b["scale"], b["skipped"]), f"replay {replay}"
    assert [entry["skipped"] for entry in got] == [int(replay >= OVERFLOW) for replay in range(REPLAYS)]
    assert_bitwise(got[OVERFLOW]["params"], got[OVERFLOW - 1]["params"], "parameters after the skipped replay")
    assert_bitwise(list(got[OVERFLOW]["state"].values()), list(got[OVERFLOW - 1]["state"].values()), "its state")
    assert any(not torch.equal(a, b) for a, b in zip(got[0]["params"], got[1]["params"], strict=True))
    if scaled:
        halved = SCALES[OVERFLOW] / 2
        assert [entry["scale"] for entry in got] == [*SCALES[:OVERFLOW], halved, *SCALES[OVERFLOW + 1 :]]


@on_kernels
def test_lr_and_step_counts_are_not_baked_in(place: Place) -> None:
    """An lr of 0 leaves parameters as they are, though moments move; then the same gradients move them again."""
    with zero_kernels.use_backend(place.backend):
        training = Training(torch.float32, False, place, None)
        advance = captured(training.step)
        params, state = copies(training.params), state_of(training.opt)
        training.lr.zero_()
        advance()
        assert_bitwise(training.params, params, "parameters under an lr of 0")
        moved = state_of(training.opt)
        assert not torch.equal(state["0.exp_avg"], moved["0.exp_avg"])
        assert moved["0.step"].item() == state["0.step"].item() + 1
        training.lr.fill_(1e-2)
        advance()
        assert not torch.equal(training.params[0], params[0])
    training.opt.close()


class Iteration:
    """A whole training iteration over gradients that come by autograd from tensors to be overwritten.

    The optimizer is made on the stream that is captured later: it keeps autograd's nodes of the parameters, and they
    belong to the stream that they were made on.
    """

    def __init__(self, place: Place, stream: Any) -> None:
        import zero_optim

        self.stream = stream
        with self.on_stream():
            self.params = parameters(torch.float16, place.device)
            self.lr = torch.tensor(1e-3, device=place.device)
            self.opt: Any = zero_optim.ShardedAdamW(self.params, lr=self.lr, bucket_cap_mb=SMALL_CAP_MB)
            self.scaler = zero_optim.GradScaler(place.device, SCALES[0], growth_interval=100)
            self.inputs = [torch.zeros_like(p) for p in self.params]
            for step in range(WARM_UP):
                self.write(step)
                self.step()
        if ON_GPU:
            torch.cuda.synchronize()

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def write(self, step: int) -> None:
        grads = make_gradients(self.params, 0, step, grid=2)
        if step == WARM_UP + OVERFLOW:
            grads[-1].view(-1)[1234] = math.inf
        for target, grad in zip(self.inputs, grads, strict=True):
            target.copy_(grad)

    def backward(self) -> None:
        self.scaler.scale(linear_loss(self.params, self.inputs)).backward()

    def step(self) -> None:
        self.opt.zero_grad()
        self.backward()
        self.scaler.unscale_(self.opt)
        self.opt.clip_grad_norm_(1.0)
        self.scaler.step(self.opt)
        self.scaler.update()

    def run(self, advance: Callable[[], None]) -> list[tuple[list[Tensor], float]]:
        """Parameters and loss scale after each replay."""
        seen = []
        for replay in range(REPLAYS):
            self.lr.fill_(LRS[replay])
            self.write(WARM_UP + replay)
            advance()
            seen.append(([p.cpu() for p in copies(self.params)], self.scaler.get_scale()))
        self.opt.close()
        return seen


@on_kernels
def test_a_captured_step_may_follow_eager_backwards(place: Place) -> None:
    """Whose streams the capture must not wait for: they are over, and are not in the graph."""
    with zero_kernels.use_backend(place.backend):
        seen = {}
        for captures in (False, True):
            training, step = Iteration(place, None), None
            for replay in range(OVERFLOW):
                training.opt.zero_grad(set_to_none=False)  # a replay reads gradients where the capture found them
                training.write(WARM_UP + replay)
                training.backward()
                if step is None:
                    step = captured(training.opt.step) if captures else training.opt.step
                step()
                seen[captures, replay] = [p.cpu() for p in copies(training.params)]
            training.opt.close()
        for replay in range(OVERFLOW):
            assert_bitwise(seen[True, replay], seen[False, replay], f"parameters after replay {replay}")
        assert not torch.equal(seen[True, 0][0], seen[True, 1][0])


@on_kernels
def test_replays_of_a_whole_iteration_equal_eager_ones(place: Place) -> None:
    with zero_kernels.use_backend(place.backend):
        eager = Iteration(place, None)
        want = eager.run(eager.step)
        graphed = Iteration(place, torch.cuda.Stream() if ON_GPU else None)
        got = graphed.run(captured(graphed.step, graphed.stream))
    for replay, ((params, scale), (eager_params, eager_scale)) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(params, eager_params, f"parameters after replay {replay}")
        assert scale == eager_scale
    assert got[OVERFLOW][1] == SCALES[0] / 2
    assert_bitwise(got[OVERFLOW][0], got[OVERFLOW - 1][0], "parameters after the skipped replay")
    assert not torch.equal(got[0][0][0], got[1][0][0])
